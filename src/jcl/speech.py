"""How the tool speaks to people: plain lines, whatever they quote."""

from __future__ import annotations

from rich.console import Console


def tell(console: Console, text: str) -> None:
    """Print a line as it is: paths may hold brackets, which are no markup, and are copied best unbroken.

    What a file's name may hold to steer a terminal is shown, not sent.
    """
    shown = "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text)
    console.print(shown, highlight=False, markup=False, soft_wrap=True)
