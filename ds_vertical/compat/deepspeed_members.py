"""The table of what ds_vertical overrides, calls and reads of DeepSpeed: one column for each version in `VERSIONS`.

`compat.version` holds the installed DeepSpeed to its column when it is imported. A second version is one more entry of
`VERSIONS`, and one more text at the end of each row. This file imports nothing.

An owner is `module` or `module:Class`. A row of `OVERRIDDEN` and `CALLED` is: the member's name, the module of ds_vertical that
overrides or calls it, and its parameters in each version as a stub file writes them (`=...`: it has a default). A row of `READ`
is: the module that reads or sets these attributes, and their names in each version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

VERSIONS: Final = ("0.19.8",)

ENGINE: Final = "deepspeed.runtime.engine:DeepSpeedEngine"
STAGE3: Final = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
PARAMETER_SWAPPER: Final = "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper"
OPTIMIZER_SWAPPER: Final = "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper:PartitionedOptimizerSwapper"

Rows = tuple[tuple[str, ...], ...]

OVERRIDDEN: Final[Mapping[str, Rows]] = {
    PARAMETER_SWAPPER: (("_configure_aio", "compat.swap_handles", "self, ds_config"),),
    ENGINE: (
        (
            "__init__",
            "engine.engine",
            "self, args, model, optimizer=..., model_parameters=..., training_data=..., lr_scheduler=..., mpu=...,"
            " dist_init_required=..., collate_fn=..., config=..., config_class=..., mesh_device=..., dont_change_device=...",
        ),
        ("_configure_zero_optimizer", "engine.engine", "self, optimizer"),
        ("forward", "engine.integrations.engine_calls", "self, *inputs, **kwargs"),
        ("backward", "engine.integrations.engine_calls", "self, loss, retain_graph=..., scale_wrt_gas=..."),
        ("step", "engine.integrations.engine_calls", "self, lr_kwargs=..."),
        ("set_gradient_accumulation_boundary", "engine.integrations.engine_calls", "self, is_boundary"),
        ("is_gradient_accumulation_boundary", "engine.integrations.engine_calls", "self"),
        ("compile", "engine.engine", "self, backend=..., compile_kwargs=..., schedule=..., compiled_autograd_enabled=..."),
        ("destroy", "engine.engine", "self"),
        ("save_16bit_model", "engine.checkpoint.mixin", "self, save_dir, save_filename=..., exclude_frozen_parameters=..."),
        ("_zero3_consolidated_16bit_state_dict", "engine.checkpoint.mixin", "self, exclude_frozen_parameters=..."),
        (
            "save_checkpoint",
            "engine.checkpoint.mixin",
            "self, save_dir, tag=..., client_state=..., save_latest=..., exclude_frozen_parameters=...",
        ),
        (
            "load_checkpoint",
            "engine.checkpoint.mixin",
            "self, load_dir, tag=..., load_module_strict=..., load_optimizer_states=..., load_lr_scheduler_states=...,"
            " load_module_only=..., custom_load_fn=...",
        ),
    ),
    STAGE3: (
        (
            "__init__",
            "engine.zero3.optimizer",
            "self, module, init_optimizer, param_names, timers, ds_config, static_loss_scale=..., dynamic_loss_scale=...,"
            " dynamic_loss_args=..., verbose=..., contiguous_gradients=..., reduce_bucket_size=..., prefetch_bucket_size=...,"
            " max_reuse_distance=..., max_live_parameters=..., param_persistence_threshold=...,"
            " model_persistence_threshold=..., dp_process_group=..., reduce_scatter=..., overlap_comm=...,"
            " offload_optimizer_config=..., offload_param_config=..., zenflow_config=..., sub_group_size=...,"
            " offload_ratio=..., mpu=..., clip_grad=..., gradient_accumulation_dtype=..., communication_data_type=...,"
            " fp16_master_weights_and_gradients=..., bf16_master_weights_and_gradients=..., bf16_optimizer_states=...,"
            " postscale_gradients=..., gradient_predivide_factor=..., gradient_accumulation_steps=..., elastic_checkpoint=...,"
            " aio_config=..., all2all_process_group=..., zero_hpz_partition_size=..., zero_quantized_weights=...,"
            " zero_quantized_nontrainable_weights=..., zero_module_granularity_threshold=..., log_trace_cache_warnings=...,"
            " enable_sanity_checks=..., cpuadam_cores_perc=..., save_muon_momentum_buffer_in_memory=...",
        ),
        (
            "initialize_ds_offload",
            "engine.zero3.optimizer",
            "self, module, timers, ds_config, zenflow, overlap_comm, prefetch_bucket_size, max_reuse_distance,"
            " max_live_parameters, param_persistence_threshold, model_persistence_threshold, dp_process_group,"
            " offload_param_config, mpu, zero_param_parallel_group, zero_quantized_weights,"
            " zero_quantized_nontrainable_weights, zero_module_granularity_threshold, log_trace_cache_warnings",
        ),
        ("_configure_tensor_swapping", "engine.zero3.optimizer", "self, offload_optimizer_config, aio_config"),
        ("_setup_for_real_optimizer", "engine.zero3.optimizer", "self"),
        ("create_reduce_and_remove_grad_hooks", "engine.zero3.optimizer", "self"),
        ("_get_norm_groups", "engine.zero3.optimizer", "self"),
        ("step", "engine.zero3.optimizer", "self, closure=..."),
        ("_create_fp16_sub_groups", "engine.zero3.chunks", "self, params_group"),
        ("_swappable_optimizer_subgroup", "engine.zero3.chunks", "self, sub_group_id"),
        ("get_local_fp32_grad_for_param", "engine.zero3.state", "self, param"),
        ("get_fp32_grad_for_param", "engine.zero3.state", "self, param"),
        ("set_fp32_grad_for_param", "engine.zero3.state", "self, value, param"),
        ("set_local_grad_for_param", "engine.zero3.state", "self, value, param"),
        ("update_fp32_grad_for_param_vectorized", "engine.zero3.state", "self, update_func, param_list"),
        ("get_full_hp_param", "engine.zero3.state", "self, param, optim_state_key=..."),
        ("set_full_hp_param", "engine.zero3.state", "self, value, param, optim_state_key=..."),
        ("get_local_fp32_param", "engine.zero3.state", "self, param, optim_state_key=..."),
        ("set_local_hp_param", "engine.zero3.state", "self, value, param, optim_state_key=..."),
        ("state_dict", "engine.zero3.state", "self"),
        (
            "load_state_dict",
            "engine.zero3.state",
            "self, state_dict_list, load_optimizer_states=..., load_from_fp32_weights=..., checkpoint_folder=...,"
            " load_serial=..., param_shapes=...",
        ),
    ),
}

CALLED: Final[Mapping[str, Rows]] = {
    "deepspeed": (
        (
            "initialize",
            "compat.entry_points",
            "args=..., model=..., optimizer=..., model_parameters=..., training_data=..., lr_scheduler=...,"
            " distributed_port=..., mpu=..., dist_init_required=..., collate_fn=..., config=..., mesh_param=...,"
            " config_params=...",
        ),
    ),
    "deepspeed.runtime.zero.partition_parameters:Init": (
        (
            "__init__",
            "compat.entry_points",
            "self, module=..., data_parallel_group=..., mem_efficient_linear=..., remote_device=..., pin_memory=...,"
            " config_dict_or_path=..., config=..., enabled=..., dtype=..., mpu=..., zero_param_parallel_group=...,"
            " zero_quantized_weights=..., zero_quantized_nontrainable_weights=..., sequence_data_parallel_group=...,"
            " param_swapper=..., tensor_overrides=...",
        ),
    ),
    ENGINE: (
        ("fp16_auto_cast", "compat.engine", "self"),
        ("_cast_inputs_half", "compat.engine", "self, inputs"),
        ("_save_checkpoint", "compat.stock_checkpoint", "self, save_dir, tag, client_state=..., exclude_frozen_parameters=..."),
        ("_save_zero_checkpoint", "compat.stock_checkpoint", "self, save_path, tag"),
        ("_get_ckpt_name", "compat.stock_checkpoint", "self, checkpoints_path, tag, mp_placeholder=..., pp_placeholder=..."),
        ("_get_zero_ckpt_name", "compat.stock_checkpoint", "self, checkpoints_path, tag"),
        ("_copy_recovery_script", "compat.stock_checkpoint", "self, save_path"),
        ("_get_param_fragment_func", "compat.stock_checkpoint", "self, param"),
        ("set_gradient_accumulation_boundary", "compat.engine", "self, is_boundary"),
        ("steps_per_print", "engine.train_loop", "self"),
        ("gradient_accumulation_steps", "engine.train_loop", "self"),
        ("train_micro_batch_size_per_gpu", "engine.train_loop", "self"),
        ("gradient_clipping", "engine.checkpoint.run_state", "self"),
        ("zero_sub_group_size", "engine.checkpoint.run_state", "self"),
        ("use_node_local_storage", "engine.checkpoint.run_state", "self"),
        ("zero_gather_16bit_weights_on_model_save", "engine.integrations.trainer", "self"),
    ),
    "deepspeed.runtime.engine": (("autocast_if_enabled", "engine.train_loop", "engine"),),
    STAGE3: (
        ("set_gradient_accumulation_boundary", "compat.engine", "self, is_boundary"),
        ("checkpoint_event_prologue", "compat.engine", "self"),
        ("checkpoint_event_epilogue", "compat.engine", "self"),
        ("_rigid_state_dict", "compat.stock_checkpoint", "self"),
        ("_pre_step", "compat.zero_optimizer", "self"),
        ("_partition_all_parameters", "compat.zero_optimizer", "self"),
        ("_overflow_check_and_loss_scale_update", "compat.zero_optimizer", "self, update_scale=..."),
        ("_loss_scale_update_and_overflow_cleanup", "compat.zero_optimizer", "self"),
        ("reset_cpu_buffers", "compat.zero_optimizer", "self"),
        ("invalidate_secondary_tensor", "compat.zero_optimizer", "self"),
        ("_get_param_partition_group", "compat.zero_optimizer", "self, param"),
        ("_get_param_partition_rank", "compat.zero_optimizer", "self, param"),
        ("_constant_buffered_norm2", "compat.zero_optimizer", "self, input, buffer_size=..."),
        ("get_param_id", "compat.zero_optimizer", "self, param"),
        ("_fp32_state_allgather", "compat.zero_optimizer", "self, param, fp32_state_partition"),
        ("get_param_comm_dtype", "compat.zero_optimizer", "self, param"),
        ("_swappable_optimizer_subgroup", "compat.zero_optimizer", "self, sub_group_id"),
        (
            "_get_fp32_opt_state_partition",
            "compat.zero_optimizer",
            "self, param, release_swap_buffers, optim_state_key=...",
        ),
        ("_optimizer_states_and_gradient_swap_out", "compat.zero_optimizer", "self, sub_group_id, timer_names=..."),
        ("_create_fp32_partitions", "compat.zero_optimizer", "self"),
        ("_create_next_swappable_fp32_groups", "compat.zero_optimizer", "self"),
        ("initialize_optimizer_states", "compat.zero_optimizer", "self"),
        ("scale_if_loss", "engine.assembly", "self, value"),
    ),
    OPTIMIZER_SWAPPER: (
        ("_io_aligned_numel", "compat.zero_optimizer", "self, numel"),
        ("_get_param_swap_info", "compat.zero_optimizer", "self, parameter"),
    ),
    "deepspeed.runtime.swap_tensor.optimizer_utils:OptimizerStateSwapInfo": (
        ("release_memory", "compat.zero_optimizer", "self"),
    ),
    PARAMETER_SWAPPER: (
        ("_io_aligned_numel", "compat.zero_params", "self, numel"),
        ("get_path", "compat.zero_params", "self, param, must_exist=..."),
        ("swap_in", "compat.zero_params", "self, params, async_op=..., swap_in_buffers=..."),
        ("swap_into_buffer", "compat.zero_params", "self, param, dest_buffer"),
        ("swap_out_and_release", "compat.zero_params", "self, params, async_op=..., force_buffer_release=..."),
        ("swap_out_partitioned_params", "compat.zero_params", "self, dst_fp16_params, src_fp32_params"),
        ("remove_partition_and_release_buffers", "compat.zero_params", "self, params"),
    ),
    "deepspeed.runtime.zero.partition_parameters": (("is_zero_param", "compat.zero_params", "parameter"),),
    "deepspeed.runtime.zero.linear": (("zero3_linear_wrap", "compat.zero_params", "input, weight, bias=..."),),
    "deepspeed.runtime.zero.linear:LinearFunctionForZeroStage3": (
        ("forward", "compat.zero_params", "input, weight, bias=..."),
    ),
    "deepspeed.runtime.utils": (
        ("combine_grad_norm_groups", "compat.zero_optimizer", "norm_groups, norm_type=..."),
        ("is_invalid_grad_norm", "compat.zero_optimizer", "norm"),
        ("mask_nan_or_inf_with_val_inplace", "compat.zero_optimizer", "input, device=..., val=..."),
    ),
    "deepspeed.runtime.zero.utils": (
        ("get_norm_dtype", "compat.gradient_norm", ""),
        ("apply_to_tensors_only", "compat.zero_params", "function, value, warning_msg_fn=..."),
    ),
    "deepspeed.runtime.swap_tensor.aio_config": (("get_aio_config", "compat.stock_config", "param_dict"),),
    "deepspeed.utils.zero_to_fp32": (
        (
            "_get_fp32_state_dict_from_zero_checkpoint",
            "compat.stock_checkpoint",
            "ds_checkpoint_dir, exclude_frozen_parameters",
        ),
    ),
    "deepspeed.ops.op_builder.builder:OpBuilder": (
        ("load", "compat.ops.load", "self, verbose=..."),
        ("sources", "compat.ops.load", "self"),
        ("jit_load", "compat.ops.cache", "self, verbose=..."),
    ),
}

READ: Final[Mapping[str, Rows]] = {
    ENGINE: (
        (
            "compat.engine",
            "optimizer module _config _is_gradient_accumulation_boundary module_forward_pre_hook module_forward_post_hook",
        ),
        ("compat.stock_checkpoint", "checkpoint_engine"),
        ("engine.train_loop", "training_dataloader tput_timer"),
        ("engine.progress", "monitor"),
        ("engine.checkpoint.run_state", "global_steps global_samples micro_steps skipped_steps lr_scheduler"),
    ),
    STAGE3: (
        (
            "compat.zero_optimizer",
            "overflow loss_scale loss_scaler clip_grad optimizer optimizer_swapper persistent_parameters norm_for_param_grads"
            " fp16_groups fp16_partitioned_groups_flat_id fp16_partitioned_groups_flat_numel fp32_partitioned_groups_flat"
            " sub_group_to_group_id params_in_nvme_and_cpu trainable_param_groups offload_param grad_partitions_flat_buffer"
            " gradient_accumulation_dtype _global_grad_norm _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
        ),
        ("compat.engine", "parameter_offload"),
        ("compat.stock_checkpoint", "fp16_groups sub_group_to_group_id fp32_partitioned_groups_flat"),
        ("engine.zero3.chunks", "sub_group_size swap_optimizer trainable_param_groups"),
        ("engine.zero3.optimizer", "leaf_parameters swap_optimizer dtype"),
    ),
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload": (
        ("compat.engine", "forward_hooks backward_hooks fwd_pre_hook"),
    ),
    "deepspeed.runtime.zero.parameter_offload:ZeROOrderedDict": (("compat.zero_params", "_in_forward"),),
    OPTIMIZER_SWAPPER: (
        ("compat.zero_optimizer", "swap_folder swap_element_size"),
        ("compat.swap_handles", "aio_handle aio_config gradient_swapper swap_config swap_folder"),
        ("compat.swap_buffers", "swap_buffer_manager"),
    ),
    "deepspeed.runtime.swap_tensor.async_swapper:AsyncTensorSwapper": (("compat.swap_handles", "aio_handle"),),
    "deepspeed.runtime.swap_tensor.utils:SwapBufferManager": (("compat.swap_buffers", "all_buffers free_buffer_index"),),
    PARAMETER_SWAPPER: (
        ("compat.zero_params", "id_to_path swap_folder swap_element_size min_aio_bytes"),
        ("compat.swap_handles", "aio_read_handle aio_write_handle aio_config swap_config swap_folder"),
        (
            "compat.swap_buffers",
            "aligned_elements_per_buffer available_buffer_ids param_buffer_count buffers partitioned_swap_buffer"
            " pending_writes",
        ),
    ),
    # what zero.Init grafts on a parameter, and on its shard `ds_tensor`
    "deepspeed.runtime.zero.partition_parameters:Init": (
        (
            "compat.zero_params",
            "ds_tensor ds_status ds_persist ds_id ds_numel ds_shape nvme_swapper all_gather all_gather_coalesced partition"
            " partition_numel final_location status ds_process_group",
        ),
    ),
    "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus": (
        ("compat.zero_params", "AVAILABLE NOT_AVAILABLE INFLIGHT"),
    ),
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper:PartitionedParamStatus": (
        ("compat.zero_params", "AVAILABLE NOT_AVAILABLE"),
    ),
    "deepspeed.runtime.zero.partition_parameters": (
        ("compat.engine", "GatheredParameters"),
        ("model.layers", "_init_external_params"),
    ),
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler": (
        ("compat.zero_optimizer", "dynamic cur_scale cur_iter last_overflow_iter cur_hysteresis"),
    ),
    "deepspeed.runtime.zero.config:DeepSpeedZeroConfig": (
        ("compat.engine", "gather_16bit_weights_on_model_save"),
        (
            "compat.stock_config",
            "offload_param offload_optimizer sub_group_size param_persistence_threshold model_persistence_threshold",
        ),
    ),
    "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig": (
        ("compat.stock_config", "device max_in_cpu buffer_count buffer_size"),
    ),
    "deepspeed.runtime.config:DeepSpeedConfig": (("compat.engine", "zero_config aio_config"),),
    "deepspeed.ops.op_builder.builder:OpBuilder": (("compat.ops.load", "name"),),
    # the seams: names under which DeepSpeed looks up the classes that it makes
    "deepspeed": (("compat.engine", "DeepSpeedEngine"),),
    "deepspeed.runtime.zero.stage3": (("compat.engine", "DeepSpeedZeroOptimizer_Stage3"),),
}


@dataclass(frozen=True)
class Member:
    """A member of DeepSpeed in one version.

    `owner`: `module` or `module:Class`; `used_by`: the module of ds_vertical that needs it; `parameters`: as a stub file writes
    them, None where the member is read or set and not called.
    """

    owner: str
    name: str
    use: Literal["overrides", "calls", "reads"]
    used_by: str
    parameters: str | None


def members_of(version: str) -> Iterator[Member]:
    """All members that ds_vertical needs of a version in `VERSIONS`. Raises ValueError for another version."""
    column = VERSIONS.index(version)
    uses: tuple[tuple[Literal["overrides", "calls"], Mapping[str, Rows]], ...] = (("overrides", OVERRIDDEN), ("calls", CALLED))
    for use, table in uses:
        for owner, rows in table.items():
            for name, used_by, *parameters in rows:
                yield Member(owner, name, use, used_by, parameters[column])
    for owner, rows in READ.items():
        for used_by, *names in rows:
            for name in names[column].split():
                yield Member(owner, name, "reads", used_by, None)
