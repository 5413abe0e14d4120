"""DeepSpeed's own names of keys in its JSON, and its defaults for aio."""

from __future__ import annotations

from typing import Any, Final

from ds_vertical.config.section import SECTION

AIO: Final[dict[str, Any]] = {
    "block_size": 1048576,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}


AIO_KEYS = frozenset({"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"})

# Top-level keys that DeepSpeed 0.19.8 reads; it ignores any other in silence.
TOP_LEVEL_KEYS = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
        "steps_per_print",
        "dump_state",
        "disable_python_gc",
        "disable_allgather",
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "zero_optimization",
        "activation_checkpointing",
        "comms_logger",
        "tensorboard",
        "wandb",
        "comet",
        "csv_monitor",
        "gradient_clipping",
        "fp16",
        "bf16",
        "bfloat16",
        "torch_autocast",
        "optimizer",
        "scheduler",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "flops_profiler",
        "wall_clock_breakdown",
        "memory_breakdown",
        "autotuning",
        "use_data_before_expert_parallelism",
        "hybrid_engine",
        "pipeline",
        "data_efficiency",
        "checkpoint",
        "data_types",
        "aio",
        "dataloader_drop_last",
        "log_level",
        "datastates_ckpt",
        "weight_quantization",
        "compile",
        "timers",
        "tensor_parallel",
        "expert_parallel",
        "elasticity",
        "vocabulary_size",
        "sequence_parallel_size",
        "nebula",
    ]
) | {SECTION}
