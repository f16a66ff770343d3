"""Stacks of containers, by vendor, topology and options; from which tests make whole products."""

from __future__ import annotations

from typing import Any

from deploy.config.model import Model
from deploy.config.shape import ModelShape
from deploy.planning.inventory import Gpu, GpuVendor, Inventory

TOKEN = "hf_a-token-of-the-hub"
VENDORS = ("cuda", "rocm", "cpu")

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "1p1d": {},
    "1p3d": {"topology": "1p3d"},
    "2p2d": {"topology": "2p2d"},
    "4p4d": {"gpus": 8},
    "tp2": {"topology": "1p1d", "tp": 2},
    "shared": {"gpus": 1},
    "2a+redis": {"topology": "2a+redis"},
}

FOLDER_MODEL = Model(
    ref="/data/models/Llama-3B",
    served_name="Llama-3B",
    source="folder",
    shape=ModelShape(28, 24, 8, 128, 131072),
    weight_bytes=6 * 2**30,
    version="0123456789abcdef",
)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layerwise": {"layerwise": True},
    "save-decode-cache": {"save_decode_cache": True},
    "cdi": {"gpu_access": "cdi"},
    "hub-token": {"model": "owner/name", "environ": {"HF_TOKEN": TOKEN}},
    "everywhere": {"bind": "0.0.0.0", "allow_keyless": True, "port": 9000, "name": "other"},  # noqa: S104 - not bound here
    "folder": {"given": FOLDER_MODEL},
    "own-image": {
        "image": "registry.example:5000/mine/vllm:1",
        "router": {"image": "mine/router:2"},
        "redis": {"image": "redis-local", "memory_gib": 2},
    },
    "engine": {
        "engine": {
            "env": {"A": "$HOME ${B} $$", "TOKENIZERS_PARALLELISM": "false"},
            "args": ["--seed", "$1", "--no-enable-prefix-caching"],
            "memory_gib": 40,
            "dtype": "float16",
        }
    },
    "own-redis": {
        "redis": {"url_file": "/home/user/redis-url", "tls_files": ["/home/user/ca.pem"]}
    },
    "monitoring": {"monitoring": True},
    "key": {"api_key_file": "/home/user/key", "bind": "0.0.0.0"},  # noqa: S104 - not bound here
}


def machine_with(
    vendor: GpuVendor,
    *indices: int,
    memory_mib: int = 81559,
    container_gpus: tuple[str, ...] = (),
) -> Inventory:
    """Return a machine that has GPUs with these indices."""
    rocm = vendor == "rocm"
    return Inventory(
        cpus=64,
        memory_mib=1 << 20,
        gpus=tuple(
            Gpu(
                index=index,
                vendor=vendor,
                name="MI300X" if rocm else "H100",
                memory_mib=memory_mib,
                uuid="" if rocm else f"GPU-{index}",
                render_node=f"/dev/dri/renderD{128 + 8 * index}" if rocm else "",
                arch="gfx942" if rocm else "9.0",
            )
            for index in indices
        ),
        gpu_groups=(44, 993) if rocm else (),
        container_gpus=container_gpus,
    )


def all_cases() -> dict[str, dict[str, Any]]:
    """Return the full product, by names such as 'rocm tp2 layerwise'."""
    return {
        f"{vendor} {topology} {option}": {
            "vendor": vendor, "runtime": "compose", "machine": None,
            **TOPOLOGIES[topology], **OPTIONS[option],
        }
        for vendor in VENDORS
        for topology in TOPOLOGIES
        for option in OPTIONS
    } | {
        f"{vendor} {topology} lmcache-mp {option}": {
            "vendor": vendor, "runtime": "compose", "machine": None, "connector": "lmcache-mp",
            **TOPOLOGIES[topology], **OPTIONS[option],
        }
        for vendor in ("cpu", "cuda")
        for topology in ("1p1d", "2p2d", "tp2", "2a+redis")
        for option in ("plain", "save-decode-cache", "folder", "own-redis", "monitoring")
    }  # fmt: skip
