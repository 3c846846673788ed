"""Pictures and figures inside a page: data addresses for images, and JSON that no text can break out of."""

from __future__ import annotations

import base64
import io
import json
from typing import Any, Final

from markupsafe import Markup
from PIL import Image
from torch import Tensor

PICTURE_SIDE: Final = 112
"""The longest side of a picture in pixels; a page has many."""

_EXACT_SIDE: Final = 48  # so small pictures are kept pixel for pixel


def image_address(pixels: Tensor) -> str:
    """An image (3, h, w) uint8 as a `data:` address, scaled down where it is large."""
    picture = Image.fromarray(pixels.permute(1, 2, 0).cpu().contiguous().numpy())
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    exact = max(picture.size) <= _EXACT_SIDE
    buffer = io.BytesIO()
    if exact:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.save(buffer, "JPEG", quality=82)
    kind = "png" if exact else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def script_json(value: Any) -> Markup:
    """JSON for the inside of a script element: the letters that could end it are written as escapes."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)  # holds no markup any more; json.dumps writes ASCII only
