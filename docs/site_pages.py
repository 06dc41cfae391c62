"""Hooks of mkdocs: bring pages that live outside docs/ into the site, and make links lead to where pages are there.

In the repository every link is relative to the file that holds it, so that it works wherever the file is read.
"""

import re
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# path in the repository -> path in the site
OUTSIDE = {
    "CHANGELOG.md": "reference/changes.md",
    "CONTRIBUTING.md": "explanation/contributing.md",
    "SECURITY.md": "explanation/security.md",
    "libraries/checkpoints/README.md": "reference/checkpoint-files.md",
    "libraries/workers/README.md": "reference/workers.md",
    "plugins/fsdp_backend/README.md": "reference/plugins/fsdp.md",
    "plugins/jax_backend/README.md": "reference/plugins/jax.md",
    "plugins/megatron_backend/README.md": "reference/plugins/megatron.md",
    "plugins/oidc_login/README.md": "reference/plugins/oidc.md",
    "plugins/openai_endpoints/README.md": "reference/plugins/openai.md",
    "plugins/otel_tracing/README.md": "reference/plugins/otel.md",
    "plugins/vllm_sampler/README.md": "reference/plugins/vllm.md",
    "tools/trackers/README.md": "reference/plugins/trackers.md",
    "tools/workbench/README.md": "reference/workbench.md",
}
_SOURCES = {page: source for source, page in OUTSIDE.items()}
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = dirname(config.config_file_path)
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=join(root, source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, page: str) -> str:
    """Return a page's text with its links relative to its place in the site."""
    here = dirname(_SOURCES.get(page, join("docs", page)))

    def replace(match: re.Match[str]) -> str:
        target = normpath(join(here, match.group(1)))
        in_site = OUTSIDE.get(target) or target.removeprefix("docs/")
        return f"]({relpath(in_site, dirname(page) or '.')}"

    return _LINK.sub(replace, markdown)
