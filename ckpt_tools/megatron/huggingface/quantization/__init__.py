"""Codes and scales: read, and block FP8 written.

* `quantized`: codes and scales seen as the weights they encode, and which modules config.json leaves alone
* `block_fp8`: an export's linears as codes and scales
"""
