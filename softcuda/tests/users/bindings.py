"""A program on NVIDIA's Python bindings of the driver API (PyPI: cuda-bindings): memory, a module with
an error log, launches, streams, events, captured graphs, arrays and attributes of pointers."""

import array
import ctypes

from cuda.bindings import driver as cuda

PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.global .align 4 .u32 factor = 3;
.visible .entry scale(.param .u64 data, .param .u32 count)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [data];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p, %r2, %r1;
    @%p ret;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r5, [%rd3];
    ld.global.u32 %r4, [factor];
    mul.lo.u32 %r5, %r5, %r4;
    st.global.u32 [%rd3], %r5;
    ret;
}
"""
COUNT = 1000


def ok(answer):
    error, *values = answer
    assert error == cuda.CUresult.CUDA_SUCCESS, error
    return values[0] if len(values) == 1 else tuple(values)


def main():
    ok(cuda.cuInit(0))
    device = ok(cuda.cuDeviceGet(0))
    assert ok(cuda.cuDeviceGetName(64, device)).startswith(b"softcuda")
    context = ok(cuda.cuDevicePrimaryCtxRetain(device))
    ok(cuda.cuCtxSetCurrent(context))

    log = bytearray(1000)
    option = cuda.CUjit_option
    refused, _ = cuda.cuModuleLoadDataEx(
        PTX.replace(b"mul.lo.u32", b"mul.odd.u32"),
        2,
        [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES],
        [log, len(log)],
    )
    assert refused == cuda.CUresult.CUDA_ERROR_INVALID_PTX, refused
    assert b"line 23" in log, bytes(log.rstrip(b"\0"))

    module = ok(cuda.cuModuleLoadData(PTX))
    scale = ok(cuda.cuModuleGetFunction(module, b"scale"))
    factor, size = ok(cuda.cuModuleGetGlobal(module, b"factor"))
    assert size == 4
    ok(cuda.cuMemcpyHtoD(factor, array.array("I", [7]), 4))

    numbers = array.array("I", range(COUNT))
    found = array.array("I", bytes(4 * COUNT))
    data = ok(cuda.cuMemAlloc(4 * COUNT))
    kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert ok(cuda.cuPointerGetAttribute(kind, data)) == cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    stream = ok(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
    start, end = (ok(cuda.cuEventCreate(0)) for _ in range(2))
    arguments = ((data, COUNT), (None, ctypes.c_uint))

    def launch():
        ok(cuda.cuLaunchKernel(scale, 4, 1, 1, 256, 1, 1, 0, stream, arguments, 0))

    ok(cuda.cuEventRecord(start, stream))
    ok(cuda.cuMemcpyHtoDAsync(data, numbers, 4 * COUNT, stream))
    launch()
    ok(cuda.cuMemcpyDtoHAsync(found, data, 4 * COUNT, stream))
    ok(cuda.cuEventRecord(end, stream))
    ok(cuda.cuEventSynchronize(end))
    assert ok(cuda.cuEventElapsedTime(start, end)) >= 0
    assert found.tolist() == [7 * number for number in numbers]

    ok(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    launch()
    launch()
    graph = ok(cuda.cuStreamEndCapture(stream))
    assert ok(cuda.cuGraphGetNodes(graph))[1] == 2
    executable = ok(cuda.cuGraphInstantiate(graph, 0))
    ok(cuda.cuGraphLaunch(executable, stream))
    ok(cuda.cuStreamSynchronize(stream))
    ok(cuda.cuMemcpyDtoH(found, data, 4 * COUNT))
    assert found.tolist() == [343 * number for number in numbers]
    ok(cuda.cuGraphExecDestroy(executable))
    ok(cuda.cuGraphDestroy(graph))

    # A graph with memory of its own.
    ok(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    inner = ok(cuda.cuMemAllocAsync(4 * COUNT, stream))
    ok(cuda.cuMemcpyDtoDAsync(inner, data, 4 * COUNT, stream))
    ok(cuda.cuMemsetD32Async(inner, 5, 1, stream))
    ok(cuda.cuMemcpyDtoDAsync(data, inner, 4 * COUNT, stream))
    ok(cuda.cuMemFreeAsync(inner, stream))
    graph = ok(cuda.cuStreamEndCapture(stream))
    first = ok(cuda.cuGraphGetRootNodes(graph, 1))[0][0]
    assert ok(cuda.cuGraphNodeGetType(first)) == cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEM_ALLOC
    parameters = ok(cuda.cuGraphMemAllocNodeGetParams(first))
    assert (parameters.bytesize, int(parameters.dptr)) == (4 * COUNT, int(inner))
    executable = ok(cuda.cuGraphInstantiate(graph, 0))
    ok(cuda.cuGraphLaunch(executable, stream))
    ok(cuda.cuMemcpyDtoHAsync(found, data, 8, stream))
    ok(cuda.cuStreamSynchronize(stream))
    assert found.tolist()[:2] == [5, 343]
    ok(cuda.cuGraphExecDestroy(executable))
    ok(cuda.cuGraphDestroy(graph))

    description = cuda.CUDA_ARRAY3D_DESCRIPTOR()
    description.Width, description.Height, description.Depth = 10, 5, 2
    description.Format = cuda.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT32
    description.NumChannels = 1
    cube = ok(cuda.cuArray3DCreate(description))
    ok(cuda.cuMemcpyHtoA(cube, 0, numbers, 400))
    copy = cuda.CUDA_MEMCPY3D()
    copy.srcMemoryType, copy.srcArray = cuda.CUmemorytype.CU_MEMORYTYPE_ARRAY, cube
    copy.srcXInBytes, copy.srcY, copy.srcZ = 8, 1, 1
    copy.dstMemoryType, copy.dstDevice = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE, data
    copy.WidthInBytes, copy.Height, copy.Depth = 8, 2, 1
    ok(cuda.cuMemcpy3D(copy))
    ok(cuda.cuMemcpyDtoH(found, data, 16))
    assert found.tolist()[:4] == [62, 63, 72, 73]
    ok(cuda.cuArrayDestroy(cube))

    ok(cuda.cuMemFree(data))
    assert cuda.cuMemFree(data)[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuModuleUnload(module))
    ok(cuda.cuDevicePrimaryCtxRelease(device))
    print("cuda-bindings: all as expected")


main()
