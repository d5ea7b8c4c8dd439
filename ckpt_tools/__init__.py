"""Inspect, convert, verify and redistribute Megatron `torch_dist` and Megatron-FSDP `fsdp_dtensor` checkpoints.

Data goes through six rooms, left to right; a room imports nothing to its right::

    catalog/  ->  megatron/  ->  sharding/  ->  plan/  ->  execute/  ->  verify/      convert/, cli/ on top
    what is       what the       where each     which      move the      prove it
    on disk       keys mean      piece goes     bytes      bytes

One conversion, as data::

    directory or URL
      | catalog.dcp.read_catalog            .metadata through an allow-listed unpickler, no torch
    Catalog {key: TensorEntry(dtype, shape, chunks) | ObjectEntry}
      | megatron.torch_dist                 keys -> parameters, optimizer layout -> views, groups, common state
      | megatron.fsdp_dtensor               what the target must contain, under its own names
    Target (TargetTensor: key, dtype, shape, the views it is read through)
      | sharding.placement                  a box per (training rank, tensor)
      | plan.build                          views x boxes x chunks -> transfers; coverage is proven here
    Plan (plain data; printed by `plan`, executed by `convert`)
      | execute                             tiles through a fixed buffer, CRC as they pass, one file per rank
    files, `.metadata` last, directory renamed into place, tracker replaced

Tensor bytes are moved, not computed on: everything that decides their way is in `.metadata` and the common state.
"""

__version__ = "0.1.0"
