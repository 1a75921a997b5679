"""Offers DeepSpeed's names about ZeRO at DeepSpeed's paths."""
