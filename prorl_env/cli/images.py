"""``prorl-env image list``."""

from __future__ import annotations

import json

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from prorl_env.config import Paths
from prorl_env.remote.images import ImageStore

__all__ = ["show_images"]


def show_images(paths: Paths, *, as_json: bool) -> None:
    """Print the images of the store."""
    images = ImageStore(paths.home).list()
    if as_json:
        for image in images:
            print(
                json.dumps(
                    {"name": image.name, "digest": image.digest, "bytes": image.size_bytes, "path": str(image.path)}
                )
            )
        return
    table = Table("image", "digest", "size", box=None, pad_edge=False)
    table.add_column("path", overflow="fold")
    for image in images:
        table.add_row(image.name, (image.digest or "")[:12], decimal(image.size_bytes), str(image.path))
    Console().print(
        table if images else "The image store is empty. Run `prorl-env image build base` or `… build host`."
    )
