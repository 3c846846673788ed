"""Commands that write features down and look things up in them."""
