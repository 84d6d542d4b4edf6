"""What runs methods: processes and devices, training, evaluation, and the folder a run leaves behind."""
