"""Failures under rankwise, Lightning, torchrun and torch.multiprocessing: how each job ends."""
