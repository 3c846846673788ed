"""Commands that take backbones from other libraries and hand them over."""
