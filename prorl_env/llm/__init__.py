"""Language models and the exact tokens they sample.

``TransformersBackend`` runs a model in this process and needs the extra ``transformers``. Only ``load`` imports torch.
"""

from __future__ import annotations

from prorl_env.llm.sampling_params import Generation, SamplingParams
from prorl_env.llm.tokens import TokenStream
from prorl_env.llm.transformers_backend import TransformersBackend

__all__ = ["Generation", "SamplingParams", "TokenStream", "TransformersBackend"]
