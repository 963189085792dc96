"""Route /: a page that compresses a document, shows which of its tokens are kept, and asks about it."""

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.responses import Response


def page() -> Response:
    """GET /: the page; it loads nothing from elsewhere, and all that it shows comes from this server's other pages."""
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
    """The page in UTF-8, and the policy by which browsers run its own script and style alone."""
    text = (resources.files("jaxkv.serving") / "page.html").read_text("utf-8")
    script, style = (_digest(text, tag) for tag in ("script", "style"))
    allowed = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), allowed


def _digest(text: str, tag: str) -> str:
    """SHA-256 of what stands within the page's one element of this name, as a policy's source."""
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
