"""Tables that are spread over ranks, with torchrec."""
