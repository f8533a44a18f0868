"""The two kernels of the mover and their compilation. Owns the CUDA C++ text; it launches nothing.

Both go over *tiles*: TILE_VECTORS vectors of one plane of one block, one thread block each. They are given the planes
of a pool and the numbers of blocks, and compute addresses themselves. `sum_blocks` adds the sums of tiles to that of
their block (see device_sum.py); `copy_blocks` does so with the very bytes that it writes, of the first `checked`
blocks: each byte is read once, and what was summed is what arrived. Thread blocks are short, so whatever is more
urgent need not wait.
"""

import struct

from ...session.errors import PoolError
from . import device_sum

THREADS = 256
TILE_VECTORS = 4096

# offset, stride, vectors, vectors of the planes before it
PLANE = struct.Struct("<QQII")

SOURCE = f"""
typedef unsigned int u32;
typedef unsigned long long u64;

struct Plane {{ u64 offset, stride; u32 vectors, before; }};

static_assert(sizeof(Plane) == {PLANE.size}, "as they are packed in Python");

const u32 THREADS = {THREADS}, TILE = {TILE_VECTORS}, AT_ONCE = 8;

__device__ __forceinline__ u64 fold(u64 value, u64 factor) {{
    value *= factor;
    return value ^ value >> 32;
}}

__device__ __forceinline__ u64 mix(ulonglong2 vector, u64 index) {{
    u64 mixed = fold(vector.x ^ ({device_sum.KEY:#x}ull + index * {device_sum.STEP:#x}ull), {device_sum.A:#x}ull);
    mixed = fold(mixed ^ vector.y, {device_sum.B:#x}ull);
    mixed = fold(mixed, {device_sum.C:#x}ull);
    return fold(mixed, {device_sum.D:#x}ull);
}}

// Which part of the work this thread block has: the place of a block in the lists, a plane, a tile's first vector.
struct Part {{ u32 item, plane, begin; }};

__device__ __forceinline__ Part part_of(u32 plane_count, u32 tiles) {{
    const u32 block = blockIdx.x / tiles;
    return {{block / plane_count, block % plane_count, blockIdx.x % tiles * TILE}};
}}

// Adds what the threads of this thread block have summed to the sum of its block. For all of them, or none.
__device__ __forceinline__ void add_up(u64 sum, u64* of_block) {{
    __shared__ u64 of_warps[THREADS / 32];
    for (u32 distance = 16; distance; distance /= 2) sum += __shfl_down_sync(~0u, sum, distance);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (u32 warp = 1; warp < THREADS / 32; ++warp) sum += of_warps[warp];
    atomicAdd(of_block, sum);
}}

extern "C" __global__ void __launch_bounds__({THREADS})
sum_blocks(const char* pool, const Plane* planes, u32 plane_count, u32 tiles, const u32* blocks, u64* sums) {{
    const Part part = part_of(plane_count, tiles);
    const Plane plane = planes[part.plane];
    if (part.begin >= plane.vectors) return;
    const u32 end = min(part.begin + TILE, plane.vectors);
    const ulonglong2* from =
        reinterpret_cast<const ulonglong2*>(pool + plane.offset + blocks[part.item] * plane.stride);
    u64 sum = 0;
    for (u32 i = part.begin + threadIdx.x; i < end; i += THREADS * AT_ONCE) {{
        ulonglong2 vectors[AT_ONCE];
        #pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k)
            if (i + k * THREADS < end) vectors[k] = from[i + k * THREADS];
        #pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k)
            if (i + k * THREADS < end) sum += mix(vectors[k], plane.before + i + k * THREADS);
    }}
    add_up(sum, &sums[part.item]);
}}

extern "C" __global__ void __launch_bounds__({THREADS})
copy_blocks(const char* source, const Plane* source_planes, char* destination, const Plane* destination_planes,
            u32 plane_count, u32 tiles, const u32* blocks, const u32* to_blocks, u64* sums, u32 checked,
            u32 in_place) {{
    const Part part = part_of(plane_count, tiles);
    const u32 block = blocks[part.item], to_block = to_blocks[part.item];
    const bool is_summed = part.item < checked, is_written = !(in_place && block == to_block);
    if (!is_summed && !is_written) return;
    const Plane plane = source_planes[part.plane], to_plane = destination_planes[part.plane];
    if (part.begin >= plane.vectors) return;
    const u32 end = min(part.begin + TILE, plane.vectors);
    const ulonglong2* from =
        reinterpret_cast<const ulonglong2*>(source + plane.offset + block * plane.stride);
    ulonglong2* to =
        reinterpret_cast<ulonglong2*>(destination + to_plane.offset + to_block * to_plane.stride);
    u64 sum = 0;
    for (u32 i = part.begin + threadIdx.x; i < end; i += THREADS * AT_ONCE) {{
        ulonglong2 vectors[AT_ONCE];
        #pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k)
            if (i + k * THREADS < end) vectors[k] = from[i + k * THREADS];
        if (is_written) {{
            #pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k)
                if (i + k * THREADS < end) to[i + k * THREADS] = vectors[k];
        }}
        if (is_summed) {{
            #pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k)
                if (i + k * THREADS < end) sum += mix(vectors[k], plane.before + i + k * THREADS);
        }}
    }}
    if (is_summed) add_up(sum, &sums[part.item]);
}}
"""


def compile_kernels(architecture: str) -> bytes:
    """The kernels for an architecture such as `sm_90`, as a CUBIN. Raises PoolError where NVRTC is missing or fails."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise PoolError(f"no CUDA bindings ({error}); install midstream with its extra `gpu`") from error
    try:
        status, program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"midstream.cu", 0, [], [])
    # The bindings raise errors of several kinds where the library is missing.
    except (RuntimeError, OSError, ImportError) as error:
        raise PoolError(f"no NVRTC ({str(error)[:200]}); install midstream with its extra `gpu`") from error
    if int(status) != 0:
        raise PoolError(f"NVRTC cannot begin: {status.name}; install the NVRTC of this driver's CUDA version")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            size = nvrtc.nvrtcGetProgramLogSize(program)[1]
            log = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            text = bytes(log).decode(errors="replace").strip("\0\n ")
            raise PoolError(f"the kernels do not compile for {architecture}: {text[:1000]}; use a newer NVRTC")
        status, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytearray(size)
        if int(status) != 0 or int(nvrtc.nvrtcGetCUBIN(program, cubin)[0]) != 0 or not size:
            raise PoolError(f"NVRTC made no code for {architecture}; use a newer NVRTC")
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
