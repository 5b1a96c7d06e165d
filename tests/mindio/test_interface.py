"""Names, signatures, enums and return codes are those of MindIO, so that a framework written for it runs unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from mindio_ttp import controller_ttp, framework_ttp

from tests.rank.fakes import become
from ttprun.introspect.current_rank import Rank
from ttprun.mindio import handlers as codes
from ttprun.protocol import mindio

FRAMEWORK = {
    "tft_init_controller": "(rank, world_size, enable_local_copy, enable_arf=False, enable_zit=False)",
    "tft_start_controller": "(bind_ip, port, enable_tls=True, tls_info='')",
    "tft_destroy_controller": "()",
    "tft_init_processor": "(rank, world_size, enable_local_copy, enable_tls=True, tls_info='', enable_uce=True, "
    "enable_arf=False, enable_zit=False)",
    "tft_start_processor": "(master_ip, port, local_ip='')",
    "tft_destroy_processor": "()",
    "tft_is_reboot_node": "()",
    "tft_get_reboot_type": "()",
    "tft_set_optimizer_replica": "(rank, replica_info)",
    "tft_set_dp_group_info": "(rank, dp_rank_list)",
    "tft_set_step_args": "(args)",
    "tft_start_copy_os": "()",
    "tft_start_updating_os": "(backup_step=-1)",
    "tft_end_updating_os": "(step)",
    "tft_exception_handler": "(func)",
    "tft_report_error": "(error_type, error_code='')",
    "tft_wait_next_action": "()",
    "tft_wait_repair_action": "()",
    "tft_get_repair_step": "()",
    "tft_get_repair_type": "()",
    "tft_reset_limit_step": "()",
    "tft_report_load_ckpt_step": "(step)",
    "tft_pause_train": "(cur_step)",
    "tft_can_do_uce_repair": "(hbm_error_time, start_time=None, end_time=None)",
    "tft_register_exception_handler": "(fault_pattern, fault_type, fault_handle)",
    "tft_register_decrypt_handler": "(decryptor)",
    "set_mindio_export_version": "(framework_type)",
    "ttp_init_controller": "(rank, world_size, enable_local_copy, enable_arf=False, enable_zit=False)",
    "ttp_start_processor": "(master_ip, port, local_ip='')",
} | {
    f"tft_register_{name}_handler": "(func, ctx=None)"
    for name in ["stop", "clean", "repair", "rollback", "rebuild_group", "save_ckpt", "rename", "exit", "stream_sync",
                 "zit_upgrade_rollback", "zit_upgrade_repair", "zit_upgrade_rebuild", "zit_downgrade_rebuild"]
}  # fmt: skip
CONTROLLER = {
    "tft_register_mindx_callback": "(action, func)",
    "tft_notify_controller_stop_train": "(fault_ranks, stop_type='stop', timeout=None)",
    "tft_notify_controller_on_global_rank": "(fault_ranks, time=1)",
    "tft_notify_controller_change_strategy": "(strategy, params='')",
    "tft_notify_controller_prepare_action": "(action, fault_ranks=None)",
    "tft_notify_controller_dump": "()",
    "tft_query_high_availability_switch": "()",
    "tft_init_controller": "(rank, world_size, enable_local_copy, enable_arf=False, enable_zit=False)",
    "tft_start_controller": "(bind_ip, port, enable_tls=True, tls_info='')",
    "tft_destroy_controller": "()",
}


def signature_of(function: Callable[..., Any]) -> str:
    """Without types: those are nobody's business at run time."""
    plain = inspect.signature(function)
    untyped = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in plain.parameters.values()]
    return str(plain.replace(parameters=untyped, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("name", FRAMEWORK)
def test_a_function_of_the_framework_can_be_called_as_in_mindio(name: str) -> None:
    assert signature_of(getattr(framework_ttp, name)) == FRAMEWORK[name]


@pytest.mark.parametrize("name", CONTROLLER)
def test_a_function_of_the_scheduler_can_be_called_as_in_mindio(name: str) -> None:
    assert signature_of(getattr(controller_ttp, name)) == CONTROLLER[name]


@pytest.mark.parametrize(
    ("enum", "first", "names"),
    [
        (framework_ttp.Action, 0, "RETRY EXIT"),
        (framework_ttp.OptimizerType, 0, "ATTENTION MOE"),
        (framework_ttp.PauseType, 1, "PAUSE RAISE"),
        (
            framework_ttp.ReportState, 0,
            "RS_NORMAL RS_RETRY RS_UCE RS_UCE_CORRUPTED RS_HCCL_FAILED RS_INIT_FINISH RS_PREREPAIR_FINISH "
            "RS_STEP_FINISH RS_UNKNOWN",
        ),
        (
            framework_ttp.RepairType, 0,
            "RT_SEND RT_UCE_HIGHLEVEL RT_UCE_LOWLEVEL RT_RECV_REPAIR RT_ROLLBACK RT_LOAD_CKPT RT_LOAD_REBUILD",
        ),
    ],
)  # fmt: skip
def test_an_enum_has_the_numbers_of_mindio(enum: type[Enum], first: int, names: str) -> None:
    assert [(member.value, member.name) for member in enum] == [*enumerate(names.split(), first)]


def test_return_codes_are_those_of_mindio() -> None:
    assert (codes.RET_OK, codes.RET_ERROR, codes.RET_NO_REBUILD) == (0, 1, 2)


def test_modules_that_frameworks_import_are_there() -> None:
    from mindio_ttp.framework_ttp.ttp_decorator import tft_report_load_ckpt_step
    from mindio_ttp.utils import tft_can_do_uce_repair

    assert callable(tft_report_load_ckpt_step)
    assert callable(tft_can_do_uce_repair)


def test_outside_of_a_job_the_train_function_says_how_to_start_it() -> None:
    become(None)

    @framework_ttp.tft_exception_handler
    def train() -> None: ...

    with pytest.raises(RuntimeError, match="start the script with: ttprun --mindio"):
        train()


def test_only_a_function_can_be_decorated() -> None:
    with pytest.raises(TypeError, match="callable"):
        framework_ttp.tft_exception_handler(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda: framework_ttp.tft_init_controller(0, 100_001, False), "world_size is 100001"),
        (lambda: framework_ttp.tft_init_controller(2, 2, False), "rank is 2; give 0 to 1"),
        (lambda: framework_ttp.tft_start_controller("127.0.0.1", 80), "port is 80; give 1024 to 65535"),
        (lambda: framework_ttp.tft_start_controller("0.0.0.0", 8000), "no address of one machine"),
        (lambda: framework_ttp.tft_init_processor(1, 2, False), "rank 0 of 2, and not rank 1 of 2"),
        (lambda: framework_ttp.tft_end_updating_os(0), "step is 0; give 1 or more"),
        (lambda: framework_ttp.set_mindio_export_version("Megatron"), "no framework 'Megatron'"),
        (
            lambda: framework_ttp.tft_set_optimizer_replica(
                0, [{"rank_list": [0, 1, 2], "replica_cnt": 2, "replica_shift": 0}]
            ),
            "2 copies cannot lie in ranks",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(session: Rank, call: Callable[[], None], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        call()


def test_a_rank_says_that_it_can_train_with_fewer_once_it_is_switched_on_and_there_is_a_handler(
    session: Rank,
) -> None:
    framework_ttp.tft_register_zit_downgrade_rebuild_handler(print)
    before = list(session.channel.sent)  # type: ignore[attr-defined]
    framework_ttp.tft_init_processor(0, 2, False, enable_zit=True)

    assert before == []
    assert session.channel.sent == [mindio.ElasticDeclared()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("processor", "controller", "has_handler"), [(False, True, True), (True, False, True), (True, True, False)]
)
def test_a_rank_does_not_say_so_where_something_is_missing(
    session: Rank, processor: bool, controller: bool, has_handler: bool
) -> None:
    framework_ttp.tft_init_controller(0, 2, False, enable_zit=controller)
    framework_ttp.tft_init_processor(0, 2, False, enable_zit=processor)
    register = framework_ttp.tft_register_zit_downgrade_rebuild_handler
    (register if has_handler else framework_ttp.tft_register_zit_upgrade_rebuild_handler)(print)

    assert session.channel.sent == []  # type: ignore[attr-defined]


def test_the_data_parallel_group_is_reported_to_the_agent(session: Rank) -> None:
    framework_ttp.tft_set_dp_group_info(0, [0, 2])

    assert session.channel.sent == [mindio.DataParallelDeclared([0, 2])]  # type: ignore[attr-defined]


def test_a_controller_outside_of_the_job_has_rank_minus_one() -> None:
    framework_ttp.tft_init_controller(-1, 8, False)


def test_replicas_are_declared_to_the_agent(session: Rank) -> None:
    framework_ttp.tft_set_optimizer_replica(0, [{"rank_list": [0, 2], "replica_cnt": 2, "replica_shift": 0}])

    assert session.channel.sent == [  # type: ignore[attr-defined]
        mindio.ReplicasDeclared([mindio.DeclaredReplicas([0, 2], copies=2, shift=0)])
    ]


@pytest.mark.parametrize(
    "strategy", ["retry", "recover", "migration", "downgrade", "upgrade", "dump", "continue", "exit"]
)
def test_a_strategy_of_the_scheduler_is_passed_on(session: Rank, strategy: str) -> None:
    assert controller_ttp.tft_notify_controller_change_strategy(strategy, "{}") == 0
    assert session.channel.sent == [  # type: ignore[attr-defined]
        mindio.SchedulerAsked(strategy, params="{}")
    ]


def test_a_strategy_that_mindio_does_not_know_is_refused(session: Rank) -> None:
    assert controller_ttp.tft_notify_controller_change_strategy("shrink") == 1
    assert session.channel.sent == []  # type: ignore[attr-defined]


def test_a_hot_switch_is_passed_on_and_can_be_taken_back(session: Rank) -> None:
    codes = [
        controller_ttp.tft_notify_controller_prepare_action("hot switch", {1: 1}),
        controller_ttp.tft_notify_controller_prepare_action("stop switch"),
    ]

    assert codes == [0, 0]
    assert session.channel.sent == [  # type: ignore[attr-defined]
        mindio.SchedulerAsked("hot switch", {1: 1}),
        mindio.SchedulerAsked("stop switch"),
    ]


@pytest.mark.parametrize(
    ("action", "ranks"),
    [("hot switch", None), ("hot switch", {0: 1, 1: 1}), ("hot switch", {2: 1}), ("cold switch", {1: 1})],
)
def test_a_switch_of_no_rank_of_all_or_of_a_stranger_is_refused(
    session: Rank, action: str, ranks: dict[int, int] | None
) -> None:
    assert controller_ttp.tft_notify_controller_prepare_action(action, ranks) == 1
    assert session.channel.sent == []  # type: ignore[attr-defined]


def test_a_scheduler_can_register_four_callbacks_and_no_other(session: Rank) -> None:
    actions = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result", "report_weather")

    found = [controller_ttp.tft_register_mindx_callback(action, print) for action in actions]

    assert found == [0, 0, 0, 0, 1]
