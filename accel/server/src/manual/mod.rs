//! Calls whose body is by hand, because an annotation does not say what has to be done: where memory is whose, what a map is, what is
//! added to a build.
//!
//! What obligations `unsafe` blocks here rest on: 1. a function is the table's of that name and has these types; 2. objects are held until
//! it returns; 3. pointers are to as much as the numbers beside them say, or into the arena, which outlives all work of the back end
//! (`session`). Generated code is of the same form.
#![allow(unsafe_code, reason = "calls functions of a C API")]

mod callback;
mod device;
mod event;
mod image;
mod image_memory;
mod kernel;
mod map;
mod memory;
mod program;
mod queue;
mod svm;

pub(crate) use callback::{
    create_user_event, set_context_destructor_callback, set_event_callback, set_mem_object_destructor_callback,
    set_program_release_callback,
};
pub(crate) use device::create_sub_devices;
pub(crate) use event::{get_event_info, get_event_profiling_info};
pub(crate) use image::{
    create_image, create_image_with_properties, create_image2d, create_image3d, description2d, description3d,
    enqueue_read_image, enqueue_write_image, image_region, pixels_in_bounds,
};
pub(crate) use image_memory::all as image_bytes;
pub(crate) use kernel::set_kernel_arg;
pub(crate) use map::{check_map, enqueue_map_buffer, enqueue_map_image, enqueue_unmap_mem_object};
pub(crate) use memory::{create_buffer, create_buffer_with_properties, create_pipe, create_sub_buffer, without_host};
pub(crate) use program::{
    build_options, build_program, compile_program, get_program_info, link_program, set_program_specialization_constant,
};
pub(crate) use queue::{
    create_command_queue, create_command_queue_with_properties, enqueue_wait_for_events, get_command_queue_info,
};
pub(crate) use svm::{
    enqueue_svm_mem_fill, enqueue_svm_memcpy, enqueue_svm_migrate_mem, set_kernel_arg_svm_pointer,
    set_kernel_exec_info, svm_alloc, svm_free,
};
