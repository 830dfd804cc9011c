"""Knowledge distillation: training a student from a frozen teacher."""
