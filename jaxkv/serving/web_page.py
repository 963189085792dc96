"""Endpoint /: a page that compresses a document, shows its kept tokens, and answers questions on it."""

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.responses import Response


def serve_web_page() -> Response:
    """Return the HTML response of GET /: a page that uses only endpoints of this server."""
    text, allowed = _load_web_page()
    headers = {
        "Content-Security-Policy": allowed,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


@functools.cache
def _load_web_page() -> tuple[bytes, str]:
    """Return (page in UTF-8, content security policy that allows only the page's own script and style)."""
    text = (resources.files("jaxkv.serving") / "page.html").read_text("utf-8")
    script, style = (_hash_page_element(text, tag) for tag in ("script", "style"))
    allowed = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), allowed


def _hash_page_element(text: str, tag: str) -> str:
    """Return `'sha256-...'`, a content security policy's source for the contents of the page's only element `tag`."""
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
