"""The sweep over PyTorch's operator database: cases, what one card gives, what the distributed libraries give."""
