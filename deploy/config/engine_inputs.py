"""What engines can be given: every argument and variable of vLLM, and whether it changes KV.

One row for each name: it changes KV, it does not (with the reason), or users may not set it (with
the reason, and what to use instead). A name without a row counts as one that changes KV.
`tests/unit/config/test_engine_inputs.py` fails for a name of a tested vLLM version without a row:
add the name to a block below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from deploy.connector.pdkit_connector.identity.model_files import NAMING_FILES


@dataclass(frozen=True)
class RefusedSetting:
    """Why a setting is refused, and what to use instead; "" where there is nothing.

    Attributes:
        for_gpus: it selects GPUs; what to use instead depends on the vendor.
        family: every longer name that begins with this one is refused, too.
        if_shared: refused only for engines that share KV.
    """

    why: str
    instead: str = ""
    for_gpus: bool = False
    family: bool = False
    if_shared: bool = False


@dataclass(frozen=True)
class EngineInput:
    """Whether an argument or a variable changes KV, and whether users may set it.

    Attributes:
        unrelated: why two values of it mean the same KV; "" if they may not.
        refused: why users may not set it; None if they may.
    """

    unrelated: str = ""
    refused: RefusedSetting | None = None


CHANGES_KV = EngineInput()

_LOGS = "logs, metrics and profiles only"
_SERVER = "how clients are served, not what is computed"
_PROMPT = "changes the prompt's tokens, and keys are made from the tokens"
_OUTPUT = "chooses the output from the model's numbers, after KV is computed"
_SCHEDULE = "when, and beside which other requests, a prompt is computed"
_SPACE = "how much KV fits, not what it means"
_FILES = "how files are read, not what is in them"
_PATH = "a path, which differs between machines and containers"
_ADDRESS = "an address"
_WAIT = "how long to wait"
_SPEED = "speed only"
_BUILD = "read when vLLM is built, not when it runs"
_TRACES = "where traces go"
_GPU_NUMBERS = "which GPUs, not of which kind"
_OWN_ROW = "the identity has a row of its own for it"

_BY_PLAN = "is set by the plan"
_SET = RefusedSetting(_BY_PLAN)
_GPUS = RefusedSetting(_BY_PLAN, for_gpus=True)
_PIPELINE = RefusedSetting(
    "spreads an engine over GPUs that the plan does not count",
    "use --tp for an engine on several GPUs",
)
_DATA = RefusedSetting(
    "starts several engines in one, on GPUs that the plan does not count",
    "use --topology for more engines",
)
_CONTEXT = RefusedSetting(
    "splits the KV of a prompt among ranks, which the connector does not support"
)
_HOSTS = RefusedSetting(
    "spreads an engine over several hosts, which the plan does not do",
    "use router.engines for engines on other hosts",
)
_TLS = RefusedSetting("makes engines answer by HTTPS, and the router asks by HTTP")
_LMCACHE = RefusedSetting("overrides LMCache's configuration, which the plan sets")
_OFFLOADING = RefusedSetting("replaces the connector that the plan sets")
_NEW_WEIGHTS = RefusedSetting(
    "lets requests replace the weights of a running engine, and the KV of the old ones would "
    "answer for the new",
    "leave it out; deploy swap serves other weights; or use --topology 1a, whose engine shares no "
    "KV",
    if_shared=True,
)
_OWN_SCALES = RefusedSetting(
    "takes each engine's KV scales from its own first batch, and engines that share KV would "
    "misread each other's",
    "leave it out: vLLM takes the scales from the checkpoint; or use --topology 1a, whose engine "
    "shares no KV",
    if_shared=True,
)


def _by(instead: str) -> RefusedSetting:
    return RefusedSetting(_BY_PLAN, f"use {instead} instead")


def _names(block: str, row: EngineInput = CHANGES_KV) -> dict[str, EngineInput]:
    return dict.fromkeys(block.split(), row)


def _unrelated(reason: str, block: str) -> dict[str, EngineInput]:
    return _names(block, EngineInput(unrelated=reason))


def _refused(row: RefusedSetting, block: str, unrelated: str = "") -> dict[str, EngineInput]:
    return _names(block, EngineInput(unrelated, row))


def _merged(*blocks: Mapping[str, EngineInput]) -> Mapping[str, EngineInput]:
    """Return all rows; no name has two.

    Raises:
        ValueError: naming one that has.
    """
    rows: dict[str, EngineInput] = {}
    for block in blocks:
        if twice := rows.keys() & block.keys():
            raise ValueError(f"two rows for {', '.join(sorted(twice))}")
        rows |= block
    return MappingProxyType(rows)


# vLLM's options, with all of their names.
ARGUMENTS = _merged(
    _refused(_by("--model"), "--served-model-name", "how clients name the model"),
    _refused(_by("--model"), "--model", _OWN_ROW),
    _refused(_by("engine.bind"), "--host", _ADDRESS),
    _refused(
        _by("--port"),
        """
        --port
        --uds
        """,
        _ADDRESS,
    ),
    _refused(_by("engine.dtype"), "--dtype"),
    _refused(_by("engine.block_size"), "--block-size"),
    _refused(_by("engine.max_model_len"), "--max-model-len", _OWN_ROW),
    _refused(
        _by("--tp"),
        """
        --tensor-parallel-size
        -tp
        """,
    ),
    _refused(_by("engine.kv_cache_gib"), "--kv-cache-memory-bytes", _SPACE),
    _refused(
        _by("engine.gpu_memory"),
        """
        --gpu-memory-utilization
        --device-memory-utilization
        """,
        _SPACE,
    ),
    _refused(_by("--layerwise and --save-decode-cache"), "--kv-transfer-config", _OWN_ROW),
    _refused(_by("tracing.otlp_endpoint"), "--otlp-traces-endpoint", _TRACES),
    _refused(_SET, "--enable-prompt-tokens-details", _SERVER),
    _refused(_SET, "--distributed-executor-backend"),
    _refused(_GPUS, "--device-ids", _GPU_NUMBERS),
    _refused(_by("--api-key-file"), "--api-key"),
    _refused(_by("hf_token_file"), "--hf-token"),
    _refused(
        RefusedSetting(
            "reads options from a file, which the plan does not see", "put them into engine.args"
        ),
        "--config",
    ),
    _refused(
        _OFFLOADING,
        """
        --kv-offloading-size
        --kv-offloading-backend
        """,
    ),
    _refused(
        _TLS,
        """
        --ssl-keyfile
        --ssl-certfile
        """,
    ),
    _refused(
        _PIPELINE,
        """
        --pipeline-parallel-size
        -pp
        """,
    ),
    _refused(replace(_DATA, family=True), "--data-parallel"),
    _refused(
        _DATA,
        """
        -dp
        -dpa
        -dpb
        -dpe
        -dph
        -dpl
        -dpm
        -dpn
        -dpp
        -dpr
        --data-parallel-address
        --data-parallel-backend
        --data-parallel-external-lb
        --data-parallel-hybrid-lb
        --data-parallel-multi-port-external-lb
        --data-parallel-rank
        --data-parallel-rpc-port
        --data-parallel-size
        --data-parallel-size-local
        --data-parallel-start-rank
        --data-parallel-supervisor-port
        """,
    ),
    _refused(
        _CONTEXT,
        """
        --decode-context-parallel-size
        -dcp
        --prefill-context-parallel-size
        -pcp
        """,
    ),
    _refused(
        _HOSTS,
        """
        --nnodes
        -n
        --node-rank
        -r
        --master-addr
        --master-port
        --headless
        """,
    ),
    _refused(_OWN_SCALES, "--calculate-kv-scales"),
    _refused(_NEW_WEIGHTS, "--weight-transfer-config"),
    _unrelated(
        _LOGS,
        """
        --aggregate-engine-logging
        --collect-detailed-traces
        --cudagraph-metrics
        --custom-histogram-buckets
        --disable-access-log-for-endpoints
        --disable-log-stats
        --disable-uvicorn-access-log
        --enable-layerwise-nvtx-tracing
        --enable-log-deltas
        --enable-log-outputs
        --enable-log-requests
        --enable-logging-iteration-details
        --enable-mfu-metrics
        --enable-per-request-metrics
        --enable-server-load-tracking
        --jit-monitor-mode
        --jit-monitor-verbose
        --kv-cache-metrics
        --kv-cache-metrics-sample
        --log-config-file
        --log-error-stack
        --log-level
        --logging-config
        --max-log-len
        --per-request-spec-decode-metrics
        --profiler-config
        --show-hidden-metrics-for-version
        --use-tqdm-on-load
        --uvicorn-log-level
        """,
    ),
    _unrelated(
        _SERVER,
        """
        --allow-credentials
        --allowed-headers
        --allowed-methods
        --allowed-origins
        --api-server-count
        -asc
        --disable-fastapi-docs
        --enable-auto-tool-choice
        --enable-force-include-usage
        --enable-offline-docs
        --enable-request-id-headers
        --enable-ssl-refresh
        --enable-tokenizer-info-endpoint
        --fingerprint-mode
        --fingerprint-value
        --grpc
        --grpc-port
        --h11-max-header-count
        --h11-max-incomplete-event-size
        --return-tokens-as-token-ids
        --root-path
        --sse-keep-alive-interval
        --ssl-ca-certs
        --ssl-cert-reqs
        --ssl-ciphers
        --stream-interval
        --tool-call-parser
        --tool-server
        --reasoning-parser
        --middleware
        """,
    ),
    _unrelated(
        _PROMPT,
        """
        --chat-template
        --chat-template-content-format
        --default-chat-template-kwargs
        --exclude-tools-when-tool-choice-none
        --response-role
        --trust-request-chat-template
        """,
    ),
    _unrelated(
        _OUTPUT,
        """
        --enable-batch-sharded-sampling
        --generation-config
        --logits-processors
        --logprobs-mode
        --max-logprobs
        --override-generation-config
        --return-sampling-mask
        --structured-outputs-config
        --use-fp64-gumbel
        """,
    ),
    _unrelated(
        _SCHEDULE,
        """
        --long-prefill-token-threshold
        --long-prefill-token-threshold-adaptive
        --max-long-partial-prefills
        --max-num-active-seqs
        --max-num-batched-tokens
        --max-num-partial-prefills
        --max-num-queued-reqs
        --max-num-queued-tokens
        --max-num-scheduled-tokens
        --max-num-seqs
        --prefill-schedule-interval
        --scheduler-reserve-full-isl
        --scheduling-policy
        """,
    ),
    _unrelated(_SPACE, "--num-gpu-blocks-override"),
    _unrelated(
        _FILES,
        """
        --download-dir
        --max-parallel-loading-workers
        --safetensors-load-strategy
        --safetensors-prefetch-block-size
        --safetensors-prefetch-num-threads
        """,
    ),
    _unrelated(
        _WAIT,
        """
        --cpu-distributed-timeout-seconds
        --distributed-timeout-seconds
        --shutdown-timeout
        """,
    ),
    # The content of the folders and files that these name changes KV, too.
    dict.fromkeys(NAMING_FILES, CHANGES_KV),
    _names("""
        --additional-config
        --all2all-backend
        --allow-deprecated-quantization
        --allowed-local-media-path
        --allowed-media-domains
        --anthropic-disabled-thinking-effort
        --async-scheduling
        --attention-backend
        --attention-config
        --aux-output-config
        --code-revision
        --cohere-format
        --cohere-is-reasoning-model
        --compilation-config
        --config-format
        --convert
        --cp-kv-cache-interleave-size
        --cpu-offload-gb
        --cpu-offload-params
        --cudagraph-capture-sizes
        --dbo-decode-token-threshold
        --dbo-prefill-token-threshold
        --dcp-comm-backend
        --dcp-kv-cache-interleave-size
        --dcp-q-replicate
        --diffusion-config
        --disable-cascade-attn
        --disable-chunked-mm-input
        --disable-custom-all-reduce
        --disable-hybrid-kv-cache-manager
        --disable-nccl-for-dp-synchronization
        --disable-sliding-window
        --dp-supervisor-probe-failure-threshold
        --dp-supervisor-probe-interval-s
        --dp-supervisor-probe-timeout-s
        --dp-sync-interval
        --ec-manager-config
        --ec-transfer-config
        --elastic-ep-max-dp-size
        --enable-chunked-prefill
        --enable-cumem-allocator
        --enable-dbo
        --enable-elastic-ep
        --enable-ep-weight-filter
        --enable-eplb
        --enable-expert-parallel
        --enable-fault-tolerance
        --enable-flash-late-interaction
        --enable-flashinfer-autotune
        --enable-hc-sp
        --enable-lora
        --enable-mamba-cache-stochastic-rounding
        --enable-mamba-shared-prefix-checkpoint
        --enable-mixed-moe-lora-format
        --enable-mm-embeds
        --enable-moe-shared-loras
        --enable-nccl-comm-suspend
        --enable-prefix-caching
        --enable-prompt-embeds
        --enable-return-routed-experts
        --enable-scale-out
        --enable-shm-tensor-arena
        --enable-sleep-mode
        --enable-tower-connector-lora
        --enable-trace-replay
        --enforce-eager
        --engram-config
        --eplb-config
        --expert-placement-strategy
        --fail-on-environ-validation
        --fault-tolerance-config
        --fully-sharded-loras
        --gdn-prefill-backend
        --hf-overrides
        --ignore-patterns
        --interleave-mm-strings
        --io-processor-plugin
        --ir-op-priority
        --kda-decode-backend
        --kda-prefill-backend
        --kernel-config
        --kv-cache-dtype
        --kv-cache-dtype-skip-layers
        --kv-events-config
        --kv-sharing-fast-prefill
        --language-model-only
        --limit-mm-per-prompt
        --linear-backend
        --load-format
        --lora-dtype
        --lora-target-modules
        --mamba-backend
        --mamba-block-size
        --mamba-cache-dtype
        --mamba-cache-mode
        --mamba-cache-philox-rounds
        --mamba-ssm-cache-dtype
        --mamba-ssu-algorithm
        --max-cpu-loras
        --max-cudagraph-capture-size
        --max-lora-cls-labels
        --max-lora-rank
        --max-loras
        --media-io-kwargs
        --mm-device-do-normalize
        --mm-encoder-attn-backend
        --mm-encoder-attn-dtype
        --mm-encoder-fp8-scale-save-margin
        --mm-encoder-fp8-scale-save-path
        --mm-encoder-only
        --mm-encoder-tp-mode
        --mm-hasher-algorithm
        --mm-ipc-gpu-memory-gb
        --mm-processor-cache-gb
        --mm-processor-cache-type
        --mm-processor-device
        --mm-processor-kwargs
        --mm-shm-cache-max-object-size-mb
        --mm-tensor-ipc
        --model-class-overrides
        --model-impl
        --moe-backend
        --monokernel
        --numa-bind
        --numa-bind-cpus
        --numa-bind-nodes
        --offload-backend
        --offload-group-size
        --offload-num-in-group
        --offload-params
        --offload-prefetch-step
        --optimization-level
        --override-attention-dtype
        --performance-mode
        --pooler-config
        --prefix-cache-retention-interval
        --prefix-caching-hash-algo
        --prefix-match-unit
        --pt-load-map-location
        --quantization
        --quantization-config
        --ray-workers-use-nsight
        --reasoning-config
        --reasoning-effort-map
        --reasoning-parser-plugin
        --renderer-num-workers
        --replayssm-buffer-len
        --revision
        --runner
        --scheduler-cls
        --seed
        --skip-mm-profiling
        --skip-tokenizer-init
        --sleep-mode-backend
        --sleep-mode-offload-cudagraph
        --sleep-preserve-parameter-names
        --sparse-indexer-topk-backend
        --spec-method
        --spec-tokens
        --specialize-active-lora
        --swa-bounded-replay
        --tokenizer-mode
        --tokenizer-revision
        --tokens-only
        --tool-parser-plugin
        --tool-strict-level
        --trust-remote-code
        --trust-request-mm-kwargs
        --ubatch-size
        --use-replayssm
        --video-pruning-method
        --video-pruning-rate
        --watchdog-config
        --watermark
        --watermark-config
        --worker-cls
        --worker-extension-cls
        -ac
        -cc
        -dc
        -ep
        -q
        """),
)

# Variables that vLLM reads, that the plan sets, or that users may not set; families end in "_".
VARIABLES = _merged(
    _refused(
        RefusedSetting("is set by pdkit: keys match only if all engines have the same"),
        "PYTHONHASHSEED",
        "the digest of the identity itself",
    ),
    _refused(
        _SET,
        """
        TMPDIR
        HOME
        USER
        LOGNAME
        """,
        _PATH,
    ),
    _refused(
        RefusedSetting("must not be the same for several engines"),
        "PROMETHEUS_MULTIPROC_DIR",
        _PATH,
    ),
    _refused(
        _GPUS,
        """
        CUDA_VISIBLE_DEVICES
        NVIDIA_VISIBLE_DEVICES
        HIP_VISIBLE_DEVICES
        ROCR_VISIBLE_DEVICES
        """,
        _GPU_NUMBERS,
    ),
    _refused(_SET, "CUDA_DEVICE_ORDER"),
    _refused(
        RefusedSetting(
            "would make engines refuse the router, which has a key of the stack's own",
            "use --api-key-file instead, for a key that clients must send",
        ),
        "VLLM_API_KEY",
        _SERVER,
    ),
    _refused(_by("--port"), "VLLM_PORT", _ADDRESS),
    _refused(_by("--model"), "VLLM_MODEL_REDIRECT_PATH"),
    _refused(_by("engine.kv_cache_gib"), "VLLM_CPU_KVCACHE_SPACE", _SPACE),
    _refused(_by("lmcache.chunk_size"), "LMCACHE_CHUNK_SIZE"),
    _refused(_by("lmcache.staging_gib"), "LMCACHE_MAX_LOCAL_CPU_SIZE"),
    _refused(_by("redis.url_file"), "LMCACHE_REMOTE_URL"),
    _refused(_by("--layerwise"), "LMCACHE_USE_LAYERWISE"),
    _refused(_by("--save-decode-cache"), "LMCACHE_SAVE_DECODE_CACHE"),
    _refused(
        _SET,
        """
        LMCACHE_CONFIG_FILE
        PDKIT_ENGINE_SOCKET
        PDKIT_KV_SERVER_SOCKET
        """,
        _PATH,
    ),
    _refused(_by("engine.key_file"), "PDKIT_ENGINE_KEY_FILE", _PATH),
    _refused(_SET, "PDKIT_STORE_BARRIER_S", _WAIT),
    _refused(
        _SET,
        """
        PDKIT_PROCESS_NUMBERS
        PDKIT_SHARED_MEMORY
        """,
        "names and numbers of an engine's own processes and memory",
    ),
    _refused(replace(_LMCACHE, family=True), "LMCACHE_"),
    _refused(_LMCACHE, "LMCACHE_TRACK_USAGE", _LOGS),
    # Of these families, but no part of the plan.
    _unrelated(_LOGS, "LMCACHE_LOG_LEVEL"),
    _names("PDKIT_DISABLE_FIXES"),
    _refused(
        _SET,
        """
        PDKIT_MODEL_FILES
        PDKIT_NAMED_FILES
        """,
        _OWN_ROW,
    ),
    _refused(replace(_SET, family=True), "PDKIT_"),
    _refused(replace(_DATA, family=True), "VLLM_DP_"),
    _refused(
        _DATA,
        """
        VLLM_DP_MASTER_IP
        VLLM_DP_MASTER_PORT
        VLLM_DP_RANK
        VLLM_DP_RANK_LOCAL
        VLLM_DP_SIZE
        """,
    ),
    _unrelated(
        _LOGS,
        """
        VLLM_LOGGING_LEVEL
        VLLM_LOGGING_PREFIX
        VLLM_LOGGING_STREAM
        VLLM_LOGGING_COLOR
        VLLM_LOGGING_CONFIG_PATH
        VLLM_CONFIGURE_LOGGING
        VLLM_LOG_STATS_INTERVAL
        VLLM_LOG_BATCHSIZE_INTERVAL
        VLLM_LOG_MODEL_INSPECTION
        VLLM_DEBUG_LOG_API_SERVER_RESPONSE
        VLLM_DISABLE_LOG_LOGO
        VLLM_RINGBUFFER_WARNING_INTERVAL
        VLLM_REQUEST_BODY_LOG_LEVEL
        VLLM_MOONCAKE_STORE_TIER_LOG
        VLLM_TRACE_FUNCTION
        VLLM_CUSTOM_SCOPES_FOR_PROFILING
        VLLM_NVTX_SCOPES_FOR_PROFILING
        VLLM_GC_DEBUG
        VLLM_DEBUG_MFU_METRICS
        VLLM_PROCESS_NAME_PREFIX
        VLLM_NO_USAGE_STATS
        VLLM_DO_NOT_TRACK
        VLLM_USAGE_SOURCE
        VLLM_USAGE_STATS_SERVER
        FORCE_COLOR
        NO_COLOR
        DO_NOT_TRACK
        """,
    ),
    _unrelated(
        _SERVER,
        """
        VLLM_HTTP_MAX_REQUEST_BODY_SIZE
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH
        VLLM_MAX_N_SEQUENCES
        VLLM_MAX_STOP_STRINGS
        VLLM_MAX_NUM_BAD_WORDS
        VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        VLLM_MAX_COMPLETION_PROMPTS
        VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        VLLM_ENFORCE_STRICT_TOOL_CALLING
        VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY
        VLLM_ENABLE_COHERE_API
        VLLM_ENABLE_RESPONSES_API_STORE
        VLLM_SKIP_MODEL_NAME_VALIDATION
        VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
        """,
    ),
    _unrelated(
        _PROMPT,
        """
        VLLM_CHAT_TEMPLATE_FUEL
        VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
        VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS
        VLLM_SYSTEM_START_DATE
        """,
    ),
    _unrelated(
        _OUTPUT,
        """
        VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT
        VLLM_USE_FLASHINFER_SAMPLER
        VLLM_V1_USE_OUTLINES_CACHE
        VLLM_XGRAMMAR_CACHE_MB
        VLLM_XPU_USE_SAMPLER_KERNEL
        """,
    ),
    _unrelated(
        _WAIT,
        """
        VLLM_AUDIO_FETCH_TIMEOUT
        VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
        VLLM_ENGINE_ITERATION_TIMEOUT_S
        VLLM_ENGINE_READY_TIMEOUT_S
        VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        VLLM_IMAGE_FETCH_TIMEOUT
        VLLM_MEDIA_FETCH_MAX_RETRIES
        VLLM_REGEX_COMPILATION_TIMEOUT_S
        VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
        VLLM_VIDEO_FETCH_TIMEOUT
        VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
        """,
    ),
    _unrelated(
        _ADDRESS,
        """
        VLLM_HOST_IP
        VLLM_LOOPBACK_IP
        VLLM_RPC_BASE_PATH
        VLLM_NIXL_SIDE_CHANNEL_HOST
        VLLM_NIXL_SIDE_CHANNEL_PORT
        """,
    ),
    _unrelated(
        "who asks a hub, and by which network: what it gives is known by its commit",
        """
        HF_TOKEN
        HTTPS_PROXY
        HTTP_PROXY
        NO_PROXY
        NCCL_DEBUG
        NCCL_IB_HCA
        NCCL_SOCKET_IFNAME
        GLOO_SOCKET_IFNAME
        https_proxy
        http_proxy
        no_proxy
        """,
    ),
    _unrelated(
        _PATH,
        """
        HF_HOME
        HF_HUB_CACHE
        HF_TOKEN_PATH
        HUGGINGFACE_HUB_CACHE
        TORCHINDUCTOR_CACHE_DIR
        VLLM_ASSETS_CACHE
        VLLM_ASSETS_CACHE_MODEL_CLEAN
        VLLM_CACHE_ROOT
        VLLM_CONFIG_ROOT
        VLLM_DEBUG_DUMP_PATH
        VLLM_XLA_CACHE_PATH
        """,
    ),
    _unrelated(
        _SPEED,
        """
        OMP_NUM_THREADS
        VLLM_CPU_NUM_OF_RESERVED_CPU
        VLLM_CPU_OMP_THREADS_BIND
        VLLM_MEDIA_LOADING_THREAD_COUNT
        """,
    ),
    _unrelated(
        _BUILD,
        """
        CMAKE_BUILD_TYPE
        MAX_JOBS
        NVCC_THREADS
        VERBOSE
        VLLM_BUILD_COMMIT
        VLLM_BUILD_PIPELINE
        VLLM_BUILD_URL
        VLLM_DOCKER_BUILD_CONTEXT
        VLLM_IMAGE_TAG
        VLLM_MAIN_CUDA_VERSION
        VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
        VLLM_SKIP_VERSION_SUFFIX
        VLLM_USE_PRECOMPILED
        VLLM_USE_PRECOMPILED_RUST
        """,
    ),
    _unrelated(
        _TRACES,
        """
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
        OTEL_EXPORTER_OTLP_TRACES_TIMEOUT
        OTEL_RESOURCE_ATTRIBUTES
        OTEL_SERVICE_NAME
        """,
    ),
    _names("""
        CUDA_HOME
        K_SCALE_CONSTANT
        LD_LIBRARY_PATH
        LOCAL_RANK
        MOONCAKE_PREFERRED_SEGMENT
        MOONCAKE_REQUESTER_LOCAL_HOSTNAME
        Q_SCALE_CONSTANT
        S3_ACCESS_KEY_ID
        S3_ENDPOINT_URL
        S3_SECRET_ACCESS_KEY
        VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN
        VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE
        VLLM_ALLOW_INSECURE_SERIALIZATION
        VLLM_ALLOW_LONG_MAX_MODEL_LEN
        VLLM_ALLOW_RUNTIME_LORA_UPDATING
        VLLM_ALLREDUCE_USE_FLASHINFER
        VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC
        VLLM_ALLREDUCE_USE_SYMM_MEM
        VLLM_B12X_MOE_FP4_FORCE_A16
        VLLM_BATCH_INVARIANT
        VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER
        VLLM_CI_USE_S3
        VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD
        VLLM_COMPILE_CACHE_SAVE_FORMAT
        VLLM_COMPUTE_NANS_IN_LOGITS
        VLLM_CPU_ATTN_SPLIT_KV
        VLLM_CPU_CI_ENV
        VLLM_CPU_INT4_W4A8
        VLLM_CPU_SGL_KERNEL
        VLLM_CUDART_SO_PATH
        VLLM_CUDA_COMPATIBILITY_PATH
        VLLM_DBO_COMM_SMS
        VLLM_DCP_Q_REPLICATE
        VLLM_DEBUG_WORKSPACE
        VLLM_DEEPEPLL_NVFP4_DISPATCH
        VLLM_DEEPEP_BUFFER_SIZE_MB
        VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE
        VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL
        VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE
        VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION
        VLLM_DEEPEP_V2_PREFER_OVERLAP
        VLLM_DEEP_GEMM_WARMUP
        VLLM_DISABLED_KERNELS
        VLLM_DISABLE_COMPILE_CACHE
        VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION
        VLLM_DISABLE_PYNCCL
        VLLM_DISABLE_SHARED_EXPERTS_STREAM
        VLLM_DISTRIBUTED_USE_SPLIT_GROUP
        VLLM_EC_SIDE_CHANNEL_HOST
        VLLM_EC_SIDE_CHANNEL_PORT
        VLLM_ELASTIC_EP_DRAIN_REQUESTS
        VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
        VLLM_ENABLE_CUDAGRAPH_GC
        VLLM_ENABLE_CUDA_COMPATIBILITY
        VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE
        VLLM_ENABLE_GEMM_RS
        VLLM_ENABLE_HPC_OPS
        VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING
        VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE
        VLLM_ENABLE_PREGRAD_PASSES
        VLLM_ENABLE_STARTUP_PLAN
        VLLM_ENABLE_V1_MULTIPROCESSING
        VLLM_FASTSAFETENSORS_QUEUE_SIZE
        VLLM_FLASHINFER_ALLREDUCE_BACKEND
        VLLM_FLASHINFER_ALLREDUCE_FUSION_THRESHOLDS_MB
        VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR
        VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS
        VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE
        VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
        VLLM_FLOAT32_MATMUL_PRECISION
        VLLM_FORCE_AOT_LOAD
        VLLM_GDN_DECODE_KERNEL
        VLLM_GPU_NIC_PCIE_MAPPING
        VLLM_GPU_SYNC_CHECK
        VLLM_HAS_FLASHINFER_CUBIN
        VLLM_HUMMING_INPUT_QUANT_CONFIG
        VLLM_HUMMING_MOE_GEMM_TYPE
        VLLM_HUMMING_ONLINE_QUANT_CONFIG
        VLLM_HUMMING_USE_F16_ACCUM
        VLLM_KIMI_K3_AUX_ATTN_RES_STREAM
        VLLM_KIMI_K3_GEMM_AR
        VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT
        VLLM_KV_CACHE_LAYOUT
        VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
        VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS
        VLLM_LORA_DISABLE_PDL
        VLLM_LORA_ENABLE_DUAL_STREAM
        VLLM_LORA_RESOLVER_CACHE_DIR
        VLLM_LORA_RESOLVER_HF_REPO_LIST
        VLLM_MARLIN_INPUT_DTYPE
        VLLM_MARLIN_USE_ATOMIC_ADD
        VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
        VLLM_MAX_AUDIO_DECODE_BYTES
        VLLM_MAX_AUDIO_DECODE_DURATION_S
        VLLM_MAX_AUDIO_PREPROCESS_WORKERS
        VLLM_MAX_EMBED_DECODE_BYTES
        VLLM_MAX_IMAGE_PIXELS
        VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB
        VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES
        VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB
        VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE
        VLLM_MEDIA_CACHE
        VLLM_MEDIA_CACHE_MAX_SIZE_MB
        VLLM_MEDIA_CACHE_TTL_HOURS
        VLLM_MEDIA_CONNECTOR
        VLLM_MEDIA_URL_ALLOW_REDIRECTS
        VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
        VLLM_MLA_DISABLE
        VLLM_MM_HASHER_ALGORITHM
        VLLM_MOE_ROUTING_SIMULATION_STRATEGY
        VLLM_MOE_SKIP_PADDING
        VLLM_MOE_USE_DEEP_GEMM
        VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
        VLLM_MOONCAKE_BOOTSTRAP_PORT
        VLLM_MOONCAKE_CONNECTOR_TIMEOUT
        VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO
        VLLM_MOONCAKE_LOAD_RECV_THREADS
        VLLM_MQ_MAX_CHUNK_BYTES_MB
        VLLM_MSGPACK_ZERO_COPY_THRESHOLD
        VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD
        VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD
        VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD
        VLLM_NCCL_INCLUDE_PATH
        VLLM_NCCL_SO_PATH
        VLLM_NIC_SELECTION_VARS
        VLLM_NIXL_EP_MAX_NUM_RANKS
        VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
        VLLM_P2P_HANDSHAKE_TIMEOUT_S
        VLLM_P2P_IDLE_TIMEOUT_S
        VLLM_P2P_MAX_PEERS
        VLLM_P2P_SIDE_CHANNEL_HOST
        VLLM_P2P_SIDE_CHANNEL_PORT
        VLLM_PATTERN_MATCH_DEBUG
        VLLM_PLUGINS
        VLLM_PP_LAYER_PARTITION
        VLLM_PREFIX_CACHE_RETENTION_INTERVAL
        VLLM_RAISE_ON_LOGIT_NANS
        VLLM_RANDOMIZE_DP_DUMMY_INPUTS
        VLLM_RAY_BUNDLE_INDICES
        VLLM_RAY_DP_PACK_STRATEGY
        VLLM_RAY_DP_PLACEMENT_NODE_IPS
        VLLM_RAY_EXTRA_ENV_VARS_TO_COPY
        VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
        VLLM_RAY_PER_WORKER_GPUS
        VLLM_REPLICATE_EMBED
        VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS
        VLLM_ROCM_AITER_MLA_ASM_PADDING
        VLLM_ROCM_AITER_MLA_DCP_VERIFY
        VLLM_ROCM_AITER_MOE_DISPATCH_POLICY
        VLLM_ROCM_FP8_MFMA_PAGE_ATTN
        VLLM_ROCM_FP8_PADDING
        VLLM_ROCM_MOE_PADDING
        VLLM_ROCM_MONO_DECODE
        VLLM_ROCM_MUSE_MOE_ONLINE_QUANT
        VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE
        VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
        VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB
        VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB
        VLLM_ROCM_QUICK_REDUCE_QUANTIZATION
        VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB
        VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT
        VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
        VLLM_ROCM_USE_AITER
        VLLM_ROCM_USE_AITER_CUSTOM_AR
        VLLM_ROCM_USE_AITER_FP4BMM
        VLLM_ROCM_USE_AITER_FP4_ASM_GEMM
        VLLM_ROCM_USE_AITER_FP8BMM
        VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS
        VLLM_ROCM_USE_AITER_LINEAR
        VLLM_ROCM_USE_AITER_LINEAR_HIPBMM
        VLLM_ROCM_USE_AITER_MHA
        VLLM_ROCM_USE_AITER_MLA
        VLLM_ROCM_USE_AITER_MOE
        VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4
        VLLM_ROCM_USE_AITER_MOE_SITUV2
        VLLM_ROCM_USE_AITER_PAGED_ATTN
        VLLM_ROCM_USE_AITER_RMSNORM
        VLLM_ROCM_USE_AITER_TRITON_GEMM
        VLLM_ROCM_USE_AITER_TRITON_ROPE
        VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA
        VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION
        VLLM_ROCM_USE_SKINNY_GEMM
        VLLM_RUST_FRONTEND_PATH
        VLLM_SERVER_DEV_MODE
        VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
        VLLM_SKIP_P2P_CHECK
        VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
        VLLM_SSM_CONV_STATE_LAYOUT
        VLLM_STEP5_SHARD_SP_SHARED_EXPERT
        VLLM_TARGET_DEVICE
        VLLM_TEST_FORCE_FP8_MARLIN
        VLLM_TEST_FORCE_LOAD_FORMAT
        VLLM_TPU_BUCKET_PADDING_GAP
        VLLM_TPU_MOST_MODEL_LEN
        VLLM_TPU_USING_PATHWAYS
        VLLM_TRITON_ATTN_USE_TD
        VLLM_TRITON_FORCE_FIRST_CONFIG
        VLLM_TRITON_JIT_WARMUP_NUM_THREADS
        VLLM_TRITON_USE_TD
        VLLM_TUNED_CONFIG_FOLDER
        VLLM_USE_AOT_COMPILE
        VLLM_USE_BREAKABLE_CUDAGRAPH
        VLLM_USE_BYTECODE_HOOK
        VLLM_USE_DEEP_GEMM
        VLLM_USE_DEEP_GEMM_E8M0
        VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES
        VLLM_USE_DIRECT_DCP_A2A
        VLLM_USE_DIRECT_DCP_KV_GATHER
        VLLM_USE_DIRECT_DCP_Q_GATHER
        VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT
        VLLM_USE_FASTOKENS
        VLLM_USE_FLASHINFER_MOE_INT4
        VLLM_USE_FUSED_MOE_GROUPED_TOPK
        VLLM_USE_HW_AGNOSTIC
        VLLM_USE_LAYERNAME
        VLLM_USE_MEGA_AOT_ARTIFACT
        VLLM_USE_MODELSCOPE
        VLLM_USE_NCCL_SYMM_MEM
        VLLM_USE_OINK_OPS
        VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
        VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
        VLLM_USE_RAY_V2_EXECUTOR_BACKEND
        VLLM_USE_RAY_WRAPPED_PP_COMM
        VLLM_USE_RUST_BENCH
        VLLM_USE_RUST_FRONTEND
        VLLM_USE_SIMPLE_KV_OFFLOAD
        VLLM_USE_SPINLOOP_EXT
        VLLM_USE_STANDALONE_COMPILE
        VLLM_USE_TRITON_AWQ
        VLLM_USE_V2_MODEL_RUNNER
        VLLM_VIDEO_LOADER_BACKEND
        VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
        VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
        VLLM_WORKER_MULTIPROC_METHOD
        VLLM_WSL2_ENABLE_PIN_MEMORY
        VLLM_XLA_CHECK_RECOMPILATION
        VLLM_XLA_USE_SPMD
        VLLM_XPU_ENABLE_XPU_GRAPH
        VLLM_XPU_FORCE_N_CONTIG_WEIGHT
        VLLM_XPU_INC_WNA16_BACKEND
        VLLM_XPU_PP_MICROBATCH
        VLLM_ZENTORCH_WEIGHT_PREPACK
        V_SCALE_CONSTANT
        """),
)


def row_of(rows: Mapping[str, EngineInput], name: str) -> EngineInput:
    """Return the row of a name; of one without a row, that it changes KV."""
    return rows.get(name, CHANGES_KV)


def refused_variable(name: str) -> RefusedSetting | None:
    """Return why engines may not be given a variable; None if they may."""
    if name in VARIABLES:
        return VARIABLES[name].refused
    return next((row.refused for known, row in VARIABLES.items() if _is_of(known, row, name)), None)


def _is_of(family: str, row: EngineInput, name: str) -> bool:
    return row.refused is not None and row.refused.family and name.startswith(family)


def refused_option(argument: str, *, shares_kv: bool) -> tuple[str, RefusedSetting | None]:
    """Return an option's full name and why it is refused, as vLLM's parser reads the argument.

    It takes underscores for dashes, any beginning of a name, `--no-` before a flag, `--config.key`
    for a key of a JSON value, and a number right behind a short name.
    """
    name = argument.partition("=")[0].partition(".")[0]
    if not name.startswith("--"):
        name = re.sub(r"\d+$", "", name)
        return name, row_of(ARGUMENTS, name).refused
    name = name.replace("_", "-")
    off = name.startswith("--no-")
    flag = f"--{name.removeprefix('--no-')}" if off else name
    for known, row in ARGUMENTS.items():
        refused = row.refused
        # Switched off, or without other engines to misread it, there is nothing to refuse.
        if refused is None or (refused.if_shared and (off or not shares_kv)):
            continue
        if flag == known or (refused.family and flag.startswith(known)):
            return name, refused
        if len(flag) > len("--") and known.startswith(flag):
            return known, refused
    return name, None
