//! Textures and surfaces through the driver API: objects, references of modules, refusals, and that
//! the checkpoint carries them. What fetches give is tested in `tests/instructions`.

mod support;

use support::*;

const NOT_FOUND: u32 = 500;
const ILLEGAL_INSTRUCTION: u32 = 715;

unsafe extern "C" {
    safe fn cuArray3DCreate_v2(array: &mut u64, descriptor: &[u64; 5]) -> u32;
    safe fn cuArrayDestroy(array: u64) -> u32;
    safe fn cuArray3DGetDescriptor_v2(descriptor: &mut [u64; 5], array: u64) -> u32;
    fn cuMemcpyHtoA_v2(to: u64, start: usize, from: *const f32, size: usize) -> u32;
    fn cuMemcpyAtoH_v2(to: *mut f32, from: u64, start: usize, size: usize) -> u32;
    safe fn cuMipmappedArrayCreate(array: &mut u64, descriptor: &[u64; 5], levels: u32) -> u32;
    safe fn cuMipmappedArrayGetLevel(level: &mut u64, array: u64, number: u32) -> u32;
    safe fn cuMipmappedArrayDestroy(array: u64) -> u32;
    safe fn cuTexObjectCreate(
        texture: &mut u64,
        resource: &Resource,
        reading: &Reading,
        view: Option<&View>,
    ) -> u32;
    safe fn cuTexObjectDestroy(texture: u64) -> u32;
    safe fn cuTexObjectGetResourceDesc(resource: &mut Resource, texture: u64) -> u32;
    safe fn cuTexObjectGetTextureDesc(reading: &mut Reading, texture: u64) -> u32;
    safe fn cuTexObjectGetResourceViewDesc(view: &mut View, texture: u64) -> u32;
    safe fn cuSurfObjectCreate(surface: &mut u64, resource: &Resource) -> u32;
    safe fn cuSurfObjectDestroy(surface: u64) -> u32;
    safe fn cuSurfObjectGetResourceDesc(resource: &mut Resource, surface: u64) -> u32;
    fn cuModuleGetTexRef(reference: &mut u64, module: u64, name: *const u8) -> u32;
    fn cuModuleGetSurfRef(reference: &mut u64, module: u64, name: *const u8) -> u32;
    safe fn cuParamSetTexRef(function: u64, unit: i32, reference: u64) -> u32;
    safe fn cuTexRefSetArray(reference: u64, array: u64, flags: u32) -> u32;
    safe fn cuTexRefGetArray(array: &mut u64, reference: u64) -> u32;
    safe fn cuTexRefSetAddress_v2(
        offset: Option<&mut usize>,
        reference: u64,
        address: u64,
        size: usize,
    ) -> u32;
    safe fn cuTexRefGetAddress_v2(address: &mut u64, reference: u64) -> u32;
    safe fn cuTexRefSetAddress2D_v3(
        reference: u64,
        descriptor: &[u64; 3],
        address: u64,
        pitch: usize,
    ) -> u32;
    safe fn cuTexRefSetFormat(reference: u64, format: u32, channels: i32) -> u32;
    safe fn cuTexRefGetFormat(format: &mut u32, channels: &mut i32, reference: u64) -> u32;
    safe fn cuTexRefSetAddressMode(reference: u64, axis: i32, mode: u32) -> u32;
    safe fn cuTexRefGetAddressMode(mode: &mut u32, reference: u64, axis: i32) -> u32;
    safe fn cuTexRefSetFilterMode(reference: u64, mode: u32) -> u32;
    safe fn cuTexRefSetFlags(reference: u64, flags: u32) -> u32;
    safe fn cuTexRefGetFlags(flags: &mut u32, reference: u64) -> u32;
    safe fn cuTexRefCreate(reference: &mut u64) -> u32;
    safe fn cuTexRefDestroy(reference: u64) -> u32;
    safe fn cuSurfRefSetArray(reference: u64, array: u64, flags: u32) -> u32;
    safe fn cuSurfRefGetArray(array: &mut u64, reference: u64) -> u32;
    safe fn cuDeviceGetTexture1DLinearMaxWidth(
        width: &mut usize,
        format: u32,
        channels: u32,
        device: i32,
    ) -> u32;
}

/// `CUDA_RESOURCE_DESC`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Resource {
    kind: u32,
    of: [u64; 16],
    flags: u32,
}

/// `CUDA_TEXTURE_DESC`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Reading {
    beyond: [u32; 3],
    filter: u32,
    flags: u32,
    anisotropy: u32,
    level_filter: u32,
    bias: f32,
    levels: [f32; 2],
    border: [f32; 4],
    reserved: [u32; 12],
}

/// `CUDA_RESOURCE_VIEW_DESC`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct View {
    format: u32,
    size: [usize; 3],
    levels: [u32; 2],
    layers: [u32; 2],
    reserved: [u32; 16],
}

/// `CU_AD_FORMAT_FLOAT` with one channel, and with two.
const FLOAT: u64 = 0x20 | 1 << 32;
const FLOATS: u64 = 0x20 | 2 << 32;
/// `CUDA_ARRAY3D_LAYERED` and `_SURFACE_LDST`.
const LAYERED: u64 = 1;
const SURFACE: u64 = 2;
/// `CU_TRSF_NORMALIZED_COORDINATES`.
const NORMALIZED: u32 = 2;
/// `CU_RESOURCE_TYPE_MIPMAPPED_ARRAY`, `_LINEAR` and `_PITCH2D`.
const MIPMAPPED: u32 = 1;
const LINEAR: u32 = 2;
const PITCH2D: u32 = 3;

/// `k(out, texture, x, y)` fetches through an object, `r(out, x, y)` through a reference, `p(out, x)`
/// through a reference of plain memory; `w(surface, x)` writes 7 through an object, `v(x)` through a reference.
const PTX: &str = concat!(
    "
.version 8.0
.target sm_80
.address_size 64
.global .texref tex;
.global .texref flat;
.global .surfref surf;
.global .u32 plain = 5;
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .f32 p2, .param .f32 p3)
{
    .reg .b64 %d<4>; .reg .f32 %f<8>;
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
    ld.param.f32 %f0, [p2]; ld.param.f32 %f1, [p3];
    tex.2d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [%d1, {%f0, %f1}];
    st.global.f32 [%d0], %f2;
    ret;
}
.visible .entry r(.param .u64 p0, .param .f32 p1, .param .f32 p2)
{
    .reg .b64 %d<4>; .reg .f32 %f<8>; .reg .pred %p<3>; .reg .b32 %r<4>;
    ld.param.u64 %d0, [p0]; ld.param.f32 %f0, [p1]; ld.param.f32 %f1, [p2];
    tex.2d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [tex, {%f0, %f1}];
    st.global.f32 [%d0], %f2;
    mov.u64 %d1, tex;
    tex.2d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [%d1, {%f0, %f1}];
    st.global.f32 [%d0+4], %f2;
    istypep.texref %p0, %d1;
    istypep.surfref %p1, %d1;
    selp.u32 %r0, 1, 0, %p0; selp.u32 %r1, 1, 0, %p1;
    st.global.v2.u32 [%d0+8], {%r0, %r1};
    ret;
}
.visible .entry p(.param .u64 p0, .param .u32 p1)
{
    .reg .b64 %d<4>; .reg .f32 %f<8>; .reg .b32 %r<4>;
    ld.param.u64 %d0, [p0]; ld.param.u32 %r0, [p1];
    tex.1d.v4.f32.s32 {%f2, %f3, %f4, %f5}, [flat, {%r0}];
    st.global.f32 [%d0], %f2;
    ret;
}
.visible .entry w(.param .u64 p0, .param .u32 p1)
{
    .reg .b64 %d<4>; .reg .b32 %r<4>;
    ld.param.u64 %d0, [p0]; ld.param.u32 %r0, [p1]; mov.u32 %r1, 0x40E00000; mov.u32 %r2, 0;
    sust.b.2d.b32.trap [%d0, {%r0, %r2}], {%r1};
    ret;
}
.visible .entry v(.param .u32 p0)
{
    .reg .b32 %r<4>;
    ld.param.u32 %r0, [p0]; mov.u32 %r1, 0x40E00000; mov.u32 %r2, 0;
    sust.b.2d.b32.trap [surf, {%r0, %r2}], {%r1};
    ret;
}
",
    "\0"
);

/// A module, and memory for results.
struct Room {
    module: u64,
    out: u64,
}

impl Room {
    fn new() -> Room {
        let mut module = 0;
        // SAFETY: the text ends in NUL.
        ok(unsafe { cuModuleLoadData(&mut module, PTX.as_ptr()) });
        Room { module, out: allocate(64) }
    }

    fn function(&self, name: &str) -> u64 {
        let mut function = 0;
        let name = format!("{name}\0");
        // SAFETY: the name ends in NUL.
        ok(unsafe { cuModuleGetFunction(&mut function, self.module, name.as_ptr()) });
        function
    }

    /// Launches one thread, with up to four arguments in eight bytes each.
    fn launch(&self, name: &str, arguments: &[u64]) {
        let pointers: Vec<*const u64> = arguments.iter().map(|value| &raw const *value).collect();
        let (function, pointers) = (self.function(name), pointers.as_ptr().cast());
        // SAFETY: there is a pointer for each parameter.
        ok(unsafe { cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, pointers, std::ptr::null()) });
    }

    fn sync(&self) -> u32 {
        cuCtxSynchronize()
    }

    fn result(&self) -> f32 {
        ok(self.sync());
        f32::from_bits(read(self.out, 1)[0])
    }

    fn fetch(&self, texture: u64, x: f32, y: f32) -> f32 {
        self.launch("k", &[self.out, texture, bits(x), bits(y)]);
        self.result()
    }

    fn reference(&self, name: &str) -> u64 {
        let (mut reference, name) = (0, format!("{name}\0"));
        // SAFETY: the name ends in NUL.
        ok(unsafe { cuModuleGetTexRef(&mut reference, self.module, name.as_ptr()) });
        reference
    }
}

fn bits(x: f32) -> u64 {
    x.to_bits().into()
}

/// An array of four by two numbers: 0 to 7.
fn array(flags: u64) -> u64 {
    let mut array = 0;
    ok(cuArray3DCreate_v2(&mut array, &[4, 2, 0, FLOAT, flags]));
    let numbers: Vec<f32> = (0..8u8).map(f32::from).collect();
    // SAFETY: the source has that many bytes.
    ok(unsafe { cuMemcpyHtoA_v2(array, 0, numbers.as_ptr(), 32) });
    array
}

fn of_array(array: u64) -> Resource {
    let mut resource = Resource::default();
    resource.of[0] = array;
    resource
}

fn texture(resource: &Resource, reading: &Reading) -> u64 {
    let mut texture = 0;
    ok(cuTexObjectCreate(&mut texture, resource, reading, None));
    texture
}

#[test]
fn objects_describe_themselves() {
    let context = context();
    let array = array(0);
    let reading = Reading {
        beyond: [1, 2, 3],
        filter: 1,
        flags: NORMALIZED,
        border: [1.0, 2.0, 3.0, 4.0],
        ..Reading::default()
    };
    let object = texture(&of_array(array), &reading);
    let (mut resource, mut found) = (Resource::default(), Reading::default());
    ok(cuTexObjectGetResourceDesc(&mut resource, object));
    ok(cuTexObjectGetTextureDesc(&mut found, object));
    assert_eq!(resource, of_array(array));
    assert_eq!(found, reading);
    let mut view = View::default();
    assert_eq!(cuTexObjectGetResourceViewDesc(&mut view, object), INVALID_VALUE);
    let whole = View { size: [4, 2, 0], ..View::default() };
    let mut seen = 0;
    ok(cuTexObjectCreate(&mut seen, &of_array(array), &reading, Some(&whole)));
    ok(cuTexObjectGetResourceViewDesc(&mut view, seen));
    assert_eq!(view, whole);
    ok(cuTexObjectDestroy(object));
    assert_eq!(cuTexObjectDestroy(object), INVALID_VALUE);
    assert_eq!(cuTexObjectGetTextureDesc(&mut found, object), INVALID_VALUE);
    ok(cuCtxDestroy_v2(context));
    ok(cuCtxCreate_v2(&mut 0, 0, 0));
    assert_eq!(cuTexObjectDestroy(seen), INVALID_VALUE, "gone with its context");
}

#[test]
fn what_makes_no_texture_is_refused() {
    context();
    let (array, memory) = (array(0), allocate(4096));
    let plain = Resource { kind: LINEAR, ..Resource::default() };
    let with = |kind: u32, numbers: &[u64]| {
        let mut resource = Resource { kind, ..plain };
        resource.of[..numbers.len()].copy_from_slice(numbers);
        resource
    };
    let good = [
        with(0, &[array]),
        with(LINEAR, &[memory, FLOAT, 4096]),
        with(PITCH2D, &[memory, FLOAT, 8, 4, 32]),
    ];
    for resource in &good {
        texture(resource, &Reading::default());
        let mut found = Resource::default();
        ok(cuTexObjectGetResourceDesc(&mut found, texture(resource, &Reading::default())));
        assert_eq!(&found, resource);
    }
    let bad = [
        with(0, &[memory]),
        with(0, &[0]),
        with(MIPMAPPED, &[array]),
        with(LINEAR, &[0, FLOAT, 4096]),
        with(LINEAR, &[memory + 4, FLOAT, 64]),
        with(LINEAR, &[memory, FLOAT, 1 << 40]),
        with(LINEAR, &[memory, 0x20 | 3 << 32, 4096]),
        with(LINEAR, &[memory, 7 | 1 << 32, 4096]),
        with(PITCH2D, &[memory, FLOAT, 8, 4, 31]),
        with(PITCH2D, &[memory, FLOAT, 9, 4, 32]),
        with(PITCH2D, &[memory, FLOAT, u64::MAX, 4, 32]),
        with(9, &[array]),
        Resource { flags: 1, ..with(0, &[array]) },
    ];
    let mut object = 0;
    for resource in &bad {
        let code = cuTexObjectCreate(&mut object, resource, &Reading::default(), None);
        assert_eq!(code, INVALID_VALUE, "{resource:?}");
    }
    let bad = [
        Reading { beyond: [4, 0, 0], ..Reading::default() },
        Reading { filter: 2, ..Reading::default() },
        Reading { flags: 0x100, ..Reading::default() },
    ];
    for reading in &bad {
        assert_eq!(cuTexObjectCreate(&mut object, &good[0], reading, None), INVALID_VALUE);
    }
    let view = View { size: [4, 2, 0], ..View::default() };
    let bad = [
        (&good[1], view, INVALID_VALUE),
        (&good[0], View { size: [5, 2, 0], ..view }, INVALID_VALUE),
        (&good[0], View { levels: [0, 1], ..view }, INVALID_VALUE),
        (&good[0], View { format: 1, ..view }, INVALID_VALUE),
        (&good[0], View { format: 30, ..view }, NOT_SUPPORTED),
        (&good[0], View { format: 99, ..view }, INVALID_VALUE),
    ];
    for (resource, view, wanted) in &bad {
        let code = cuTexObjectCreate(&mut object, resource, &Reading::default(), Some(view));
        assert_eq!(code, *wanted, "{view:?}");
    }
    let mut width = 0;
    ok(cuDeviceGetTexture1DLinearMaxWidth(&mut width, 0x20, 1, 0));
    assert!(width >= 1 << 27);
    assert_eq!(cuDeviceGetTexture1DLinearMaxWidth(&mut width, 0x20, 3, 0), INVALID_VALUE);
}

#[test]
fn views_show_parts_of_arrays() {
    context();
    let room = Room::new();
    let mut layers = 0;
    ok(cuArray3DCreate_v2(&mut layers, &[2, 2, 3, FLOAT, LAYERED]));
    let numbers: Vec<f32> = (0..12u8).map(f32::from).collect();
    // SAFETY: the source has that many bytes.
    ok(unsafe { cuMemcpyHtoA_v2(layers, 0, numbers.as_ptr(), 48) });
    let view = View { size: [2, 2, 3], layers: [1, 2], ..View::default() };
    let mut object = 0;
    ok(cuTexObjectCreate(&mut object, &of_array(layers), &Reading::default(), Some(&view)));
    assert_eq!(room.fetch(object, 1.5, 1.5), 7.0, "the first layer of the view is the second");
    let view = View { layers: [1, 3], ..view };
    let code = cuTexObjectCreate(&mut object, &of_array(layers), &Reading::default(), Some(&view));
    assert_eq!(code, INVALID_VALUE);
    // The bits of a number as an integer, which a fetch gives as they are.
    let format = 16; // CU_RES_VIEW_FORMAT_SINT_1X32
    let view = View { format, size: [4, 2, 0], ..View::default() };
    ok(cuTexObjectCreate(&mut object, &of_array(array(0)), &Reading::default(), Some(&view)));
    assert_eq!(room.fetch(object, 3.5, 1.5), 7.0);
}

#[test]
fn levels_are_arrays() {
    context();
    let before = used();
    let (mut levels, mut level) = (0, 0);
    ok(cuMipmappedArrayCreate(&mut levels, &[8, 4, 0, FLOATS, 0], 9));
    let mut descriptor = [0; 5];
    for (number, size) in [(0, [8, 4, 0]), (1, [4, 2, 0]), (2, [2, 1, 0]), (3, [1, 1, 0])] {
        ok(cuMipmappedArrayGetLevel(&mut level, levels, number));
        ok(cuArray3DGetDescriptor_v2(&mut descriptor, level));
        assert_eq!(descriptor[..3], size);
        assert_eq!(descriptor[3], FLOATS);
        assert_eq!(cuArrayDestroy(level), INVALID_HANDLE, "a level is not destroyed by itself");
    }
    assert_eq!(cuMipmappedArrayGetLevel(&mut level, levels, 4), INVALID_VALUE, "no halves left");
    let mut resource = Resource { kind: MIPMAPPED, ..Resource::default() };
    resource.of[0] = levels;
    let view = View { size: [4, 2, 0], levels: [1, 2], ..View::default() };
    let mut object = 0;
    ok(cuTexObjectCreate(&mut object, &resource, &Reading::default(), Some(&view)));
    ok(cuMipmappedArrayDestroy(levels));
    assert_eq!(cuMipmappedArrayDestroy(levels), INVALID_HANDLE);
    assert_eq!(cuArrayDestroy(level), INVALID_HANDLE);
    assert_eq!(used(), before);
    assert_eq!(cuMipmappedArrayCreate(&mut levels, &[8, 4, 0, FLOATS, 0], 0), INVALID_VALUE);
    assert_eq!(cuMipmappedArrayCreate(&mut levels, &[1 << 40, 4, 0, FLOATS, 0], 9), OUT_OF_MEMORY);
}

/// As CUDA's example `simpleTextureDrv` has it: one channel of single precision, linear, wrapped, with
/// coordinates from 0 to 1.
#[test]
fn a_reference_stands_for_an_array() {
    context();
    let room = Room::new();
    let (array, reference) = (array(0), room.reference("tex"));
    ok(cuTexRefSetArray(reference, array, 1));
    for axis in [0, 1] {
        ok(cuTexRefSetAddressMode(reference, axis, 0));
    }
    ok(cuTexRefSetFilterMode(reference, 1));
    ok(cuTexRefSetFlags(reference, NORMALIZED));
    ok(cuTexRefSetFormat(reference, 0x20, 1));
    ok(cuParamSetTexRef(room.function("r"), -1, reference));
    assert_eq!(cuParamSetTexRef(room.function("r"), 0, reference), INVALID_VALUE);
    // In the middle between the last and the first number of the first row, which are 3 and 0.
    room.launch("r", &[room.out, bits(1.0), bits(0.25)]);
    assert_eq!(room.result(), 1.5);
    assert_eq!(read(room.out, 4)[1..], [1.5f32.to_bits(), 1, 0], "by its address, and its type");
    // What is set after a launch is for the next one.
    room.launch("r", &[room.out, bits(1.0), bits(0.25)]);
    ok(cuTexRefSetFilterMode(reference, 0));
    assert_eq!(room.result(), 1.5);
    room.launch("r", &[room.out, bits(1.0), bits(0.25)]);
    assert_eq!(room.result(), 0.0);

    let (mut found, mut mode, mut flags, mut format) = (0, 9, 9, 9);
    ok(cuTexRefGetArray(&mut found, reference));
    ok(cuTexRefGetAddressMode(&mut mode, reference, 1));
    ok(cuTexRefGetFlags(&mut flags, reference));
    let mut channels = 0;
    ok(cuTexRefGetFormat(&mut format, &mut channels, reference));
    assert_eq!((found, mode, flags, format, channels), (array, 0, NORMALIZED, 0x20, 1));
    assert_eq!(cuTexRefGetAddress_v2(&mut found, reference), INVALID_VALUE);
    assert_eq!(cuTexRefSetArray(reference, array, 0), INVALID_VALUE);
    assert_eq!(cuTexRefSetArray(reference, 5, 1), INVALID_VALUE);
    assert_eq!(cuTexRefSetAddressMode(reference, 3, 0), INVALID_VALUE);
    assert_eq!(cuTexRefSetAddressMode(reference, 0, 4), INVALID_VALUE);
    assert_eq!(cuTexRefSetFormat(reference, 0x20, 3), INVALID_VALUE);
    assert_eq!(cuTexRefDestroy(reference), INVALID_VALUE, "it is the module's");
    ok(cuModuleUnload(room.module));
    assert_eq!(cuTexRefSetFlags(reference, 0), INVALID_VALUE);
    let mut own = 0;
    ok(cuTexRefCreate(&mut own));
    ok(cuTexRefSetFlags(own, 0));
    ok(cuTexRefDestroy(own));
    assert_eq!(cuTexRefDestroy(own), INVALID_VALUE);
}

/// Three numbers, repeated: however far a whole number is off, it means an end of the image.
#[test]
fn a_place_far_off_is_one_of_the_image() {
    context();
    let room = Room::new();
    let memory = allocate(64);
    write(memory, &[1f32, 2.0, 4.0].map(f32::to_bits));
    let mut resource = Resource { kind: PITCH2D, ..Resource::default() };
    resource.of[..5].copy_from_slice(&[memory, FLOAT, 3, 1, 32]);
    // `CU_TR_ADDRESS_MODE_WRAP` and `_MIRROR`; between the ends there are means of the two numbers there.
    for (mode, filter, value) in [(0, 0, 1.0), (0, 1, 2.5), (2, 0, 1.0), (2, 1, 1.0)] {
        let reading =
            Reading { beyond: [mode; 3], filter, flags: NORMALIZED, ..Reading::default() };
        let object = texture(&resource, &reading);
        for far in [2.0, 8_388_610.0, 1e20, f32::MAX, -4.0, -2e9, -1e20, -f32::MAX] {
            room.launch("k", &[room.out, object, bits(far), bits(0.5)]);
            assert_eq!(room.result(), value, "mode {mode}, filter {filter}, at {far}");
        }
    }
}

#[test]
fn a_reference_stands_for_plain_memory() {
    context();
    let room = Room::new();
    let memory = allocate(4096);
    let numbers: Vec<u32> = (0..1024u16).map(|n| f32::from(n).to_bits()).collect();
    write(memory, &numbers);
    let (flat, reference) = (room.reference("flat"), room.reference("tex"));
    let mut offset = 9;
    ok(cuTexRefSetFormat(flat, 0x20, 1));
    ok(cuTexRefSetAddress_v2(Some(&mut offset), flat, memory + 12, 400));
    assert_eq!(offset, 12, "the program adds three numbers");
    assert_eq!(cuTexRefSetAddress_v2(None, flat, memory + 12, 400), INVALID_VALUE);
    let mut address = 0;
    ok(cuTexRefGetAddress_v2(&mut address, flat));
    assert_eq!(address, memory);
    for (index, value) in [(5, 5.0), (102, 102.0), (103, 0.0), (u32::MAX, 0.0)] {
        room.launch("p", &[room.out, index.into()]);
        assert_eq!(room.result(), value);
    }
    ok(cuTexRefSetAddress2D_v3(reference, &[10, 5, FLOAT], memory, 64));
    room.launch("r", &[room.out, bits(3.5), bits(2.5)]);
    assert_eq!(room.result(), 35.0);
    assert_eq!(cuTexRefSetAddress2D_v3(reference, &[17, 5, FLOAT], memory, 64), INVALID_VALUE);
}

#[test]
fn names_lead_to_what_they_stand_for() {
    context();
    let room = Room::new();
    let (mut found, mut size) = (0, 0);
    // SAFETY: the names end in NUL.
    unsafe {
        let module = room.module;
        assert_eq!(cuModuleGetTexRef(&mut found, module, c"surf".as_ptr().cast()), NOT_FOUND);
        assert_eq!(cuModuleGetTexRef(&mut found, module, c"plain".as_ptr().cast()), NOT_FOUND);
        assert_eq!(cuModuleGetSurfRef(&mut found, module, c"tex".as_ptr().cast()), NOT_FOUND);
        let name = c"tex".as_ptr().cast();
        assert_eq!(cuModuleGetGlobal_v2(&mut found, &mut size, module, name), NOT_FOUND);
    }
}

#[test]
fn surfaces_are_written() {
    context();
    let room = Room::new();
    let (array, other) = (array(SURFACE), array(0));
    let mut surface = 0;
    assert_eq!(cuSurfObjectCreate(&mut surface, &of_array(other)), INVALID_VALUE);
    ok(cuSurfObjectCreate(&mut surface, &of_array(array)));
    let mut resource = Resource::default();
    ok(cuSurfObjectGetResourceDesc(&mut resource, surface));
    assert_eq!(resource, of_array(array));
    room.launch("w", &[surface, 4]);
    let mut reference = 0;
    // SAFETY: the name ends in NUL.
    unsafe {
        let name = c"surf".as_ptr().cast();
        ok(cuModuleGetSurfRef(&mut reference, room.module, name));
    }
    let mut found = 0;
    assert_eq!(cuSurfRefGetArray(&mut found, reference), INVALID_VALUE);
    assert_eq!(cuSurfRefSetArray(reference, other, 0), INVALID_VALUE);
    ok(cuSurfRefSetArray(reference, array, 0));
    ok(cuSurfRefGetArray(&mut found, reference));
    assert_eq!(found, array);
    room.launch("v", &[8]);
    ok(room.sync());
    let mut numbers = [0f32; 4];
    // SAFETY: the destination has that many bytes.
    ok(unsafe { cuMemcpyAtoH_v2(numbers.as_mut_ptr(), array, 0, 16) });
    assert_eq!(numbers, [0.0, 7.0, 7.0, 3.0]);
    // Beside it, the kernel fails.
    room.launch("w", &[surface, 16]);
    assert_eq!(room.sync(), ILLEGAL_ADDRESS);
    assert_eq!(cuSurfObjectDestroy(surface), ILLEGAL_ADDRESS);
}

#[test]
fn a_fetch_from_nothing_fails_its_context() {
    for invented in [0, 7, u64::MAX] {
        context();
        let room = Room::new();
        room.launch("k", &[room.out, invented, 0, 0]);
        assert_eq!(room.sync(), ILLEGAL_INSTRUCTION);
    }
    // Nor may what is freed be read.
    context();
    let room = Room::new();
    let memory = allocate(4 << 20);
    let mut resource = Resource { kind: PITCH2D, ..Resource::default() };
    resource.of[..5].copy_from_slice(&[memory, FLOAT, 8, 4, 32]);
    let object = texture(&resource, &Reading::default());
    ok(cuMemFree_v2(memory));
    room.launch("k", &[room.out, object, 0, 0]);
    assert_eq!(room.sync(), ILLEGAL_ADDRESS);
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let room = Room::new();
    let array = array(SURFACE);
    let object = texture(&of_array(array), &Reading::default());
    let mut surface = 0;
    ok(cuSurfObjectCreate(&mut surface, &of_array(array)));
    let reference = room.reference("tex");
    ok(cuTexRefSetArray(reference, array, 1));
    say("ready");
    listen();
    room.launch("w", &[surface, 4]);
    assert_eq!(room.fetch(object, 1.5, 0.5), 7.0);
    assert_eq!(room.fetch(object, 3.5, 1.5), 7.0);
    room.launch("r", &[room.out, bits(2.5), bits(1.5)]);
    assert_eq!(room.result(), 6.0);
    ok(cuTexObjectDestroy(object));
}

#[test]
fn the_checkpoint_carries_textures() {
    ok(cuInit(0));
    let mut program = Program::start("program", &[]);
    assert_eq!(program.hear(), "ready");
    program.checkpoint_and_restore();
    program.tell("go on");
    program.finish();
}
