"""The metadata of a built package: the README as a package index shows it, and the addresses of the project.

In the repository links of the README are relative. An index has none of those files, so that a built package has absolute ones
in their place. They begin with ``[tool.onecard] repository`` in pyproject.toml, the one place that knows the address. While it is
empty, links are text, pictures are their descriptions, and a line says where the pages are: nothing on the index's page is
broken, and no address is made up.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)


PAGES = "The pages that this text names come with the source distribution, in its folder `docs`."
"""What a reader is told where there is no address to link to."""


def for_an_index(readme: str, repository: str, version: str) -> str:
    """The README with absolute links, or without links where there is no address."""

    def led(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target:
            return match[0]
        if not repository:
            return f"*{match['text']}*" if match["image"] else match["text"]
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({repository}/{kind}/v{version}/{target})"

    parts = [part if part.startswith("```") else _LINK.sub(led, part) for part in _FENCE.split(readme)]
    text = "".join(parts)
    return text if repository else text.replace("\n## Why\n", f"\n{PAGES}\n\n## Why\n")


def addresses(repository: str, version: str) -> dict[str, str]:
    """``[project.urls]``; empty where there is no address."""
    if not repository:
        return {}
    return {
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Documentation": f"{repository}/blob/v{version}/docs/tutorial.md",
    }


class OnecardMetadata(MetadataHookInterface):
    """Fills ``readme`` and ``urls``, which pyproject.toml calls dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        import tomllib

        root = Path(self.root)
        settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        repository = settings["tool"]["onecard"]["repository"].rstrip("/")
        version = metadata["version"]
        text = for_an_index((root / "README.md").read_text(encoding="utf-8"), repository, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = addresses(repository, version)
