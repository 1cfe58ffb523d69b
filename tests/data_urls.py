"""What a page embeds."""

import base64
import io


def embedded(url):
    """Return the media type of a `data:` URL, and its bytes as a file."""
    kind, data = url.removeprefix("data:").split(";base64,")
    return kind, io.BytesIO(base64.b64decode(data))
