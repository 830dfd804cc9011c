"""Knowledge distillation: training a student from a frozen teacher, and sampling with the
student."""
