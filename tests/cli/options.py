"""Every option of every command, frozen: scripts depend on them."""

_OPEN = "--quiet -q --enable-msc --follow-links "
_READ = _OPEN + "--unknown-classes --trust-pickle --iteration "
_WRITE = "--check-source --overwrite --resume --workers --threads --max-memory --fsync --direct --json --verbose -v "
_RUN = _WRITE + "--verify --dry-run --report "
_JOB = "--layout --world-size --gpus --dp-shard --dp-outer --tp --cp --ep --etp --pp --strategy "
_JOB += "--outer-strategy --units "
_FRESH = "--fresh-optimizer --no-fresh-optimizer --lr --min-lr --weight-decay --adam-beta1 --adam-beta2 --adam-eps "
_TO_MEGATRON = _READ + _RUN + "--target --layer-spec --weights-only --dtype --ignore-keys --oom-traceback "
_TO_FSDP = (
    _TO_MEGATRON
    + _JOB
    + _FRESH
    + "--swiglu --no-swiglu --swiglu-modules --param-to-param-group-map-json --strict-map "
    "--output-optimizer-state-prefix --output-model-weight-prefix --rename-mtp-keys --experts --vocab-size-padded "
    "--vocab-size --check-masters "
)
_TO_TORCH_DIST = "--extra-state --stacked --per-layer "
_DIFF = (
    _READ
    + "--rtol --atol --ulp --nan --keys --ignore --by --headers --rules --target --json --workers --threads "
    "--verbose -v"
)
_REPORT = _READ + "--verbose -v --format --json --junit "

OPTIONS = {
    "inspect": _READ + "--keys --by --json --tree --html --not-ignore-param-to-group-meta",
    "print-torch-dcp-in-json": _OPEN + "--unknown-classes --trust-pickle --values -o --output --no-write",
    "convert": _TO_FSDP + _TO_TORCH_DIST + "--to --hf-config --max-shard-size --hard-link",
    "convert-torch-dist-to-fsdp-dtensor": _TO_FSDP,
    "convert-fsdp-dtensor-to-torch-dist": _TO_MEGATRON + _TO_TORCH_DIST + "--gpus --tp --ep --etp",
    "build-param-group-map": _OPEN
    + "-o --output --explain --target --layer-spec --experts --swiglu --no-swiglu --iteration",
    "ls": _OPEN + "--unknown-classes --trust-pickle --json",
    "stats": _READ + "--keys --layer --role --by --fail-on-nan --svg --html --workers --threads --json",
    "plan": _READ + _JOB + _FRESH
    + "--rank --tensor --json --svg --html --target --layer-spec --experts --swiglu --no-swiglu "
    "--weights-only --ignore-keys",
    "export-hf": _READ + _RUN
    + "--hf-config --rules --dtype --vocab-size --max-shard-size --mtp-copies --quantize --tower --peft --alpha "
    "--tp --check-masters --ignore-keys",
    "import-hf": _OPEN + _RUN + _JOB + _FRESH
    + "--to --rules --adapter --tower --dtype --vocab-size-padded --target --layer-spec --experts --iteration",
    "verify": _REPORT + "--content --manifest --write-manifest --allow-nonfinite --workers --threads",
    "diff": _DIFF,
    "compare-two-checkpoint": _DIFF,
    "preflight": _REPORT + "--yaml --target",
    "modify-state-dict": _READ + _RUN + "--op --hard-link",
    "slice": _READ + _RUN + "--layers --block --hard-link",
    "copy": _READ + _WRITE + "--read-back --dry-run --hard-link",
    "average": _READ + _RUN + "--weights --ema --last",
    "merge-adapter": _READ + _RUN + "--alpha --ignore-keys",
    "repair": _READ + _RUN + "--hard-link",
    "strip": _READ + _RUN + _FRESH + "--dtype --check-masters --hard-link",
    "print-tensor": _READ + "--slice --role --stats --json",
}  # fmt: skip
