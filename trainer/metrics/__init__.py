"""What a task logs, from the call to the value of all ranks; and torchmetrics objects."""
