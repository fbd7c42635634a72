"""PyTorch FSDP2 (``fully_shard``) and FSDP1: parameters, gradients and optimizer states sharded over a role's ranks."""
