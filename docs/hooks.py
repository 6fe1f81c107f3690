"""Hooks of mkdocs: pages that are made when the site is built, and links that leave ``docs/``.

- Files of the repository that pages link to become pages of the site: data/README.md, CHANGELOG.md, the notebooks with
  their output, and the configurations. The links are the same on GitHub and on the site.
- ``<!-- options of VERB -->`` becomes the list of the verb's options, from its own parser.
- The page of the public Python names comes from ``recpo/__init__.pyi``, room by room.
"""

from __future__ import annotations

import ast
import base64
import html
import json
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: Page of the site -> the file of the repository that it shows.
PAGES = {
    "data.md": "data/README.md",
    "readme.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
} | {f"notebooks/{path.stem}.md": f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
CONFIGURATIONS = "reference/configurations.md"
PYTHON = "reference/python.md"
#: Rooms whose classes are documented by their options alone.
_WITHOUT_MEMBERS = ("items", "policies", "objectives", "rewards")
#: Copies of the other files of the repository that pages link to.
FILES = "files"
_PAGE_OF = {file: page for page, file in PAGES.items()}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
#: GitHub draws mermaid by a script from elsewhere; the site shows the same road as a picture.
_DIAGRAM = re.compile(r"```mermaid\n.*?```", re.DOTALL)
_PICTURE = "![From an interaction log to recommendations](assets/road.svg)"
_OPTIONS = re.compile(r"<!-- options of (\w+) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made from files of the repository, and the pictures of the notebooks."""
    from mkdocs.structure.files import File

    contents: dict[str, str | bytes] = {CONFIGURATIONS: configurations(), PYTHON: python_names()}
    for page, file in PAGES.items():
        if file.endswith(".ipynb"):
            contents |= notebook(page, json.loads((ROOT / file).read_text(encoding="utf-8")))
        else:
            contents[page] = _DIAGRAM.sub(_PICTURE, (ROOT / file).read_text(encoding="utf-8"))
    for page in [*PAGES, *(file.src_uri for file in files.documentation_pages())]:
        contents |= {f"{FILES}/{file}": (ROOT / file).read_bytes() for file in linked_files(page)}
    for uri, content in contents.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolves links that leave ``docs/``, and the options of verbs."""
    uri = page.file.src_uri
    markdown = _OPTIONS.sub(lambda match: options_of_verbs()[match[1]], markdown)
    markdown = re.sub(r"(?m)^\|.*$", lambda row: _plain_pipes(row[0]), markdown)
    return _LINK.sub(lambda match: match[1] + site_link(uri, match[2]) + match[3], markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Docstrings announce literal blocks by ``::``, which Markdown does not know; a short option is not broken."""
    html = re.sub(r"::</p>", ":</p>", html.replace("<p>::</p>", ""))
    return re.sub(r"<code>(--[\w.]{1,30}(?: \w{1,12})?)</code>", r'<code class="option">\1</code>', html)


def site_link(page: str, target: str) -> str:
    """Where a link of a page leads on the site: as written, unless it leaves ``docs/``.

    Args:
        page: the page, relative to ``docs/``.
        target: as the source has it.
    """
    path, _, anchor = target.partition("#")
    if not path or "://" in target:
        return target
    source = PAGES.get(page, f"docs/{page}")
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    is_page = file.startswith("docs/") and not file.endswith(".py")
    found = file.removeprefix("docs/") if is_page else _PAGE_OF.get(file)
    if file.startswith("configs/") and file.endswith(".yaml"):
        found, anchor = CONFIGURATIONS, Path(file).name.replace(".", "")
    if found is None and not (ROOT / file).is_file():
        return target  # mkdocs says that it does not exist
    found = found or f"{FILES}/{file}"
    return posixpath.relpath(found, posixpath.dirname(page) or ".") + (f"#{anchor}" if anchor else "")


def linked_files(page: str) -> list[str]:
    """Files of the repository that a page links to and that are no pages: the site has copies of them."""
    text = (ROOT / PAGES.get(page, f"docs/{page}")).read_text(encoding="utf-8")
    directory = posixpath.dirname(page)
    links = (site_link(page, link[2]) for link in _LINK.finditer(text))
    found = (posixpath.normpath(posixpath.join(directory, link)) for link in links)
    return [path.removeprefix(f"{FILES}/") for path in found if path.startswith(f"{FILES}/")]


@cache
def options_of_verbs() -> dict[str, str]:
    """Verb -> its options as Markdown, by the Python that has recpo installed (``RECPO_PYTHON``)."""
    default = ROOT / ".venv" / "bin" / "python"
    python = os.environ.get("RECPO_PYTHON") or (str(default) if default.exists() else sys.executable)
    command = [python, str(ROOT / "docs" / "verb_options.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(f"{python} cannot list the options of the verbs:\n{done.stderr}")
    return json.loads(done.stdout)


def configurations() -> str:
    """One page with every file of ``configs/``."""
    parts = [
        "# Configurations\n\nThe files of `configs/`, as they are. Each is a whole experiment for `recpo train`, "
        "`recpo prepare` or `recpo tokenize`; a flag after `--config` overrides it.\n"
    ]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        parts.append(f"## {path.name}\n\n```yaml\n{path.read_text(encoding='utf-8').rstrip()}\n```\n")
    return "\n".join(parts)


def python_names() -> str:
    """One page with every public name, by the room that defines it, and the verbs as dataclasses."""
    parts = ["# Python\n\nEverything that `import recpo` gives. Names that are not listed may change without notice."]
    for room, names in public_names().items():
        described = ast.get_docstring(_parsed(ROOT / "recpo" / room / "__init__.py"))
        parts.append(f"## recpo.{room}\n\n{described}")
        shown = ", members: false" if room in _WITHOUT_MEMBERS else ", inherited_members: true" * (room == "policies")
        options = "heading_level: 3" + shown
        parts += [f"::: recpo.{name}\n    options: {{{options}}}" for name in names]
    parts.append(
        "## The verbs as dataclasses\n\nExcept for `train`, each verb is one frozen dataclass: "
        "`recpo.evaluate(**options)` is `Evaluate(**options).execute()`, and its fields are also the flags and YAML "
        "keys of `recpo evaluate`."
    )
    parts += [f"::: {name}\n    options: {{heading_level: 3, members: false}}" for name in _verb_classes()]
    return "\n\n".join(parts) + "\n"


def public_names() -> dict[str, list[str]]:
    """Room -> the names that it gives to ``recpo``, as ``recpo/__init__.pyi`` lists them."""
    found: dict[str, list[str]] = {}
    for node in _parsed(ROOT / "recpo" / "__init__.pyi").body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.setdefault(node.module.partition(".")[0], []).extend(alias.name for alias in node.names)
    return found


def _verb_classes() -> list[str]:
    return [
        f"recpo.verbs.{file.stem}.{node.name}"
        for file in sorted((ROOT / "recpo" / "verbs").glob("*.py"))
        for node in _parsed(file).body
        if isinstance(node, ast.ClassDef) and any("Verb[" in ast.unparse(base) for base in node.bases)
    ]


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def notebook(page: str, document: dict[str, Any]) -> dict[str, str | bytes]:
    """A notebook as a page, and its pictures as files beside it."""
    parts: list[str] = []
    files: dict[str, str | bytes] = {}
    for cell in document["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            for text, picture in _outputs(cell["outputs"]):
                if picture is not None:
                    name = f"{Path(page).stem}_{len(files)}.png"
                    files[posixpath.join(posixpath.dirname(page), name)] = picture
                    text = f"![Output]({name})"
                parts.append(text)
    return {page: "\n\n".join(parts) + "\n", **files}


def _outputs(outputs: list[dict[str, Any]]) -> Iterator[tuple[str, bytes | None]]:
    """What a cell printed or showed: Markdown, or the bytes of a picture."""
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            yield "", base64.b64decode("".join(data["image/png"]))
        elif "text/html" in data and "<table" in "".join(data["text/html"]):
            yield _table("".join(data["text/html"])), None
        elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            yield f'<pre class="output">{html.escape(_without_colors(text))}</pre>', None


def _table(text: str) -> str:
    """The table of a frame, without its style."""
    found = re.search(r"<table.*</table>", text, re.DOTALL)
    return re.sub(r"\n\s*", "", found[0]).replace(' border="1" class="dataframe"', "") if found else ""


def _without_colors(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _plain_pipes(row: str) -> str:
    r"""GitHub needs ``\|`` in the code of a table's cell; Python-Markdown shows the backslash."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row)
