"""Which package archive this machine itself is made from, read from apt's own settings.

The base image comes from there, so no mirror's name has to be known here, and a mirror, a keyring or a dated snapshot
that an administrator chose is used for images as well.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prorl_env.errors import SetupError

__all__ = ["Archive", "find_archive", "machine_codename"]

_ONE_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>[^#]+)")
_OPTIONS = {"signed-by": "signed-by", "trusted": "trusted", "arch": "architectures"}
_SCHEMES = ("http:", "https:", "ftp:", "file:", "copy:")
_OFFICIAL_FILES = ("sources.list", "debian.sources", "ubuntu.sources")
_OFFICIAL_KEYS = ("debian-archive-", "ubuntu-archive-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The machine's archive, as debootstrap and apt want it."""

    mirror: str
    """URI of the main archive."""
    suite: str
    keyring: str | None
    """Path of the binary keyring that signs it; ``None`` is debootstrap's own choice for the suite."""
    trusted: bool
    """Whether the administrator said that it needs no signature."""
    sources: tuple[tuple[str, str], ...]
    """For apt, with updates and security: format (``list`` or ``sources``) and text, as they stand on the machine."""


def machine_codename() -> str | None:
    """The release that this machine runs, such as ``bookworm``; ``None`` if it does not say."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return None
    return release.get("UBUNTU_CODENAME") or release.get("VERSION_CODENAME") or None


def find_archive(etc_apt: Path, codename: str | None) -> Archive:
    """Find the main archive among the sources of apt.

    Args:
        etc_apt: ``/etc/apt``.
        codename: The machine's release. A source of that suite goes before one of another.

    Raises:
        SetupError: If there is none.
    """
    sources = list(_read(etc_apt))
    ranked = [
        (not source.official, suite != codename, number, suite, source)
        for number, source in enumerate(sources)
        if source.uri.startswith(_SCHEMES) and "main" in source.components
        for suite in source.suites
        if suite == codename or re.fullmatch(r"[a-z]+", suite)
    ]
    if not ranked:
        raise SetupError(
            f"There is no main package archive of Debian or Ubuntu among the sources in {etc_apt}.",
            mend="Build it on such a machine and copy the store, or use the image `host` with runtime bubblewrap.",
        )
    _, _, _, suite, main = min(ranked, key=lambda entry: entry[:3])
    pockets = {f"{suite}-updates", f"{suite}-security"}
    beside = [
        (source.format, source.text)
        for source in sources
        if source is not main and source.signed_by == main.signed_by and pockets.issuperset(source.suites)
    ]
    keyrings = [word for word in re.split(r"[\s,]+", main.signed_by) if re.fullmatch(r"/\S+\.(gpg|pgp)", word)]
    return Archive(
        mirror=main.uri,
        suite=suite,
        keyring=keyrings[0] if keyrings else None,
        trusted=main.trusted,
        sources=((main.format, main.text), *beside),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    format: str
    text: str
    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str
    trusted: bool
    official: bool
    """By its file's or its keyring's name: others too have a suite called like the machine's."""


def _read(etc_apt: Path) -> Iterator[_Source]:
    parts = etc_apt / "sources.list.d"
    for path in (etc_apt / "sources.list", *sorted([*parts.glob("*.list"), *parts.glob("*.sources")])):
        try:
            text = path.read_text("utf-8", "replace")
        except OSError:
            continue  # Absent, or not for our eyes.
        if path.suffix == ".sources":
            for stanza in re.split(r"\n[ \t]*\n", text):
                lines = [line for line in stanza.splitlines() if line.strip() and not line.startswith("#")]
                if fields := _fields(lines):
                    yield from _source("sources", "\n".join(lines) + "\n", fields, path.name)
        else:
            for line in text.splitlines():
                if fields := _one_line(line.strip()):
                    yield from _source("list", line.strip() + "\n", fields, path.name)


def _fields(lines: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for line in lines:
        if line[0] in " \t":
            fields[name] = f"{fields.get(name, '')}\n{line.strip()}"
        else:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    return fields


def _one_line(line: str) -> dict[str, str]:
    match = _ONE_LINE.match(line)
    if match is None:
        return {}
    fields = {"types": "deb", "uris": match["uri"], "suites": match["suite"], "components": match["components"]}
    for option in (match["options"] or "").split():
        name, _, value = option.partition("=")
        fields[_OPTIONS.get(name.lower(), name.lower())] = value
    return fields


def _source(kind: str, text: str, fields: dict[str, str], file: str) -> Iterator[_Source]:
    uris, signed_by = fields.get("uris", "").split(), fields.get("signed-by", "")
    off = fields.get("enabled", "yes").lower() in ("no", "false", "off", "0", "without", "disable")
    if off or not uris or "deb" not in fields.get("types", "").split():
        return
    yield _Source(
        format=kind,
        text=text,
        uri=uris[0],
        suites=tuple(fields.get("suites", "").split()),
        components=tuple(fields.get("components", "").split()),
        signed_by=signed_by,
        trusted=fields.get("trusted", "").lower() == "yes",
        official=file in _OFFICIAL_FILES or Path(signed_by.split("\n")[0]).name.startswith(_OFFICIAL_KEYS),
    )
