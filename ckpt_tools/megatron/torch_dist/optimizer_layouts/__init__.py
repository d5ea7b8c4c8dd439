"""Where the optimizer states of a weight lie, in every layout that Megatron has had.

* `reader`: reads the states, whatever their layout
* `states`: which layout a checkpoint uses; sources of each state of each weight; states under the keys of weights
* `buckets`: flat buckets, and the weight shards that can be in them
* `bucket_proof`: which shard each stretch of a bucket is the master of, by content
* `bucket_order`: what the order of parameters says: about look-alikes, and by position alone
* `remainders`: masters kept as what the weights lack of them
"""
