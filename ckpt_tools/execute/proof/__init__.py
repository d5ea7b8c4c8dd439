"""The source is proven, and masters against weights.

* `payload_sums`: sums of what is read of a source
* `prove_source`: what is left of that proof, when all work is done
* `masters`: masters round to the stored weights
"""
