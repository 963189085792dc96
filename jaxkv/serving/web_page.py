"""Endpoint /: a page that compresses a document, shows its kept tokens, and answers questions on it."""

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.responses import Response


def page() -> Response:
    """Return the page of GET /; it loads nothing from other servers, and uses only endpoints of this one."""
    text, allowed = _page()
    headers = {
        "Content-Security-Policy": allowed,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


@functools.cache
def _page() -> tuple[bytes, str]:
    """Return the page in UTF-8, and the content security policy that allows only its own script and style."""
    text = (resources.files("jaxkv.serving") / "page.html").read_text("utf-8")
    script, style = (_digest(text, tag) for tag in ("script", "style"))
    allowed = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), allowed


def _digest(text: str, tag: str) -> str:
    """Return the SHA-256 source, for a content security policy, of the page's only element `tag`."""
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
