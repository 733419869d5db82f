"""Training of learned auctions; needs torch (extra `torch`), which running one does not."""
