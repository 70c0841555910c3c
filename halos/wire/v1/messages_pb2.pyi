from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_SERVER: _ClassVar[Role]
    ROLE_OBSERVER: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_WORKER: Role
ROLE_SERVER: Role
ROLE_OBSERVER: Role

class Range(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("id", "dataset", "origin", "ranges", "progress")
    ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    id: str
    dataset: str
    origin: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    progress: int
    def __init__(self, id: _Optional[str] = ..., dataset: _Optional[str] = ..., origin: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., progress: _Optional[int] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("dataset", "origin", "range", "progress")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    origin: int
    range: Range
    progress: int
    def __init__(self, dataset: _Optional[str] = ..., origin: _Optional[int] = ..., range: _Optional[_Union[Range, _Mapping]] = ..., progress: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("updates", "local_steps", "tokens", "loss_tokens", "contained", "dropped")
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTAINED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    updates: int
    local_steps: int
    tokens: int
    loss_tokens: float
    contained: _containers.RepeatedCompositeFieldContainer[Range]
    dropped: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, updates: _Optional[int] = ..., local_steps: _Optional[int] = ..., tokens: _Optional[int] = ..., loss_tokens: _Optional[float] = ..., contained: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., dropped: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("role", "run", "model", "datasets")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    run: str
    model: str
    datasets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., run: _Optional[str] = ..., model: _Optional[str] = ..., datasets: _Optional[_Iterable[str]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: int
    def __init__(self, fence: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: int
    def __init__(self, fence: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("fence", "lease")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    fence: int
    lease: str
    def __init__(self, fence: _Optional[int] = ..., lease: _Optional[str] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("fence", "tenure", "sequence", "in_flight", "base_version", "granted", "pushed_under")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    PUSHED_UNDER_FIELD_NUMBER: _ClassVar[int]
    fence: int
    tenure: int
    sequence: int
    in_flight: bool
    base_version: int
    granted: int
    pushed_under: int
    def __init__(self, fence: _Optional[int] = ..., tenure: _Optional[int] = ..., sequence: _Optional[int] = ..., in_flight: bool = ..., base_version: _Optional[int] = ..., granted: _Optional[int] = ..., pushed_under: _Optional[int] = ...) -> None: ...

class BlockRequest(_message.Message):
    __slots__ = ("fence", "number", "need", "want")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    fence: int
    number: int
    need: int
    want: int
    def __init__(self, fence: _Optional[int] = ..., number: _Optional[int] = ..., need: _Optional[int] = ..., want: _Optional[int] = ...) -> None: ...

class WorkerUpdate(_message.Message):
    __slots__ = ("lease", "fence", "base_version", "local_steps", "tokens", "loss", "norm", "seconds")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    fence: int
    base_version: int
    local_steps: int
    tokens: int
    loss: float
    norm: float
    seconds: float
    def __init__(self, lease: _Optional[str] = ..., fence: _Optional[int] = ..., base_version: _Optional[int] = ..., local_steps: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., norm: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("sequence", "fence", "base_version", "report", "holds")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    fence: int
    base_version: int
    report: Report
    holds: int
    def __init__(self, sequence: _Optional[int] = ..., fence: _Optional[int] = ..., base_version: _Optional[int] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., holds: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: int
    def __init__(self, fence: _Optional[int] = ...) -> None: ...

class HeartbeatSeen(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: int
    def __init__(self, fence: _Optional[int] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("number", "fence", "answers", "lease", "local_steps", "batch_size", "version")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    number: int
    fence: int
    answers: str
    lease: Lease
    local_steps: int
    batch_size: int
    version: int
    def __init__(self, number: _Optional[int] = ..., fence: _Optional[int] = ..., answers: _Optional[str] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., local_steps: _Optional[int] = ..., batch_size: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("fence", "answers")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    fence: int
    answers: str
    def __init__(self, fence: _Optional[int] = ..., answers: _Optional[str] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("fence", "tenure", "sequence", "reset", "version")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fence: int
    tenure: int
    sequence: int
    reset: bool
    version: int
    def __init__(self, fence: _Optional[int] = ..., tenure: _Optional[int] = ..., sequence: _Optional[int] = ..., reset: bool = ..., version: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("fence", "number", "blocks")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    fence: int
    number: int
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, fence: _Optional[int] = ..., number: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("fence", "granted")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    fence: int
    granted: int
    def __init__(self, fence: _Optional[int] = ..., granted: _Optional[int] = ...) -> None: ...

class PushAnswer(_message.Message):
    __slots__ = ("sequence", "fence", "version", "against")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AGAINST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    fence: int
    version: int
    against: int
    def __init__(self, sequence: _Optional[int] = ..., fence: _Optional[int] = ..., version: _Optional[int] = ..., against: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "key", "fence", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    key: str
    fence: int
    detail: str
    def __init__(self, reason: _Optional[str] = ..., key: _Optional[str] = ..., fence: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Message(_message.Message):
    __slots__ = ("join", "heartbeat", "leave", "ready", "resume", "block_request", "worker_update", "push", "welcome", "heartbeat_seen", "assignment", "receipt", "resumed", "grant", "drain", "push_answer", "refused", "stop")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_REQUEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_UPDATE_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SEEN_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    PUSH_ANSWER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    join: Join
    heartbeat: Heartbeat
    leave: Leave
    ready: Ready
    resume: Resume
    block_request: BlockRequest
    worker_update: WorkerUpdate
    push: Push
    welcome: Welcome
    heartbeat_seen: HeartbeatSeen
    assignment: Assignment
    receipt: Receipt
    resumed: Resumed
    grant: Grant
    drain: Drain
    push_answer: PushAnswer
    refused: Refused
    stop: Stop
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., block_request: _Optional[_Union[BlockRequest, _Mapping]] = ..., worker_update: _Optional[_Union[WorkerUpdate, _Mapping]] = ..., push: _Optional[_Union[Push, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., heartbeat_seen: _Optional[_Union[HeartbeatSeen, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., push_answer: _Optional[_Union[PushAnswer, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...
