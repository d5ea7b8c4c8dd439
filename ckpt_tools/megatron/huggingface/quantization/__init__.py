"""Codes and scales: read, and block FP8 written.

* `quantized`: codes and scales seen as the weights they stand for, and which modules config.json leaves alone
* `block_fp8`: an export's linears as codes and scales
"""
