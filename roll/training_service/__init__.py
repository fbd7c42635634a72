"""``roll serve-training``: many LoRA clients of one base model, over the HTTP interface of the ``tinker`` SDK."""
