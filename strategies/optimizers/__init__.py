"""Optimizer strategies and their implementations."""
