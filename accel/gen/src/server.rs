//! The server's side of an API: the table of a back end's functions, and how each call is carried out by one of them.
//!
//! Knows modules of `accel/server` by name; what a function is, `carry_out` knows.

use std::fmt::Write as _;

use accel_spec::{Api, Command, Element, Kind, Life, Param, Service};

use crate::carry_out::Body;
use crate::code::{Crossing, HEAD};
use crate::names;

/// Where the server's generated code goes.
pub(crate) const SERVER: &str = "accel/server/src/generated";

/// Commands whose body on the server's side is by hand (`accel/server/src/manual`).
const BY_HAND: &[&str] = &[
    "clBuildProgram",
    "clCompileProgram",
    "clCreateBuffer",
    "clCreateBufferWithProperties",
    "clCreateCommandQueue",
    "clCreateCommandQueueWithProperties",
    "clCreateImage",
    "clCreateImage2D",
    "clCreateImage3D",
    "clCreateImageWithProperties",
    "clCreatePipe",
    "clCreateSubBuffer",
    "clCreateSubDevices",
    "clCreateUserEvent",
    "clEnqueueMapBuffer",
    "clEnqueueMapImage",
    "clEnqueueReadImage",
    "clEnqueueSVMMemFill",
    "clEnqueueSVMMemcpy",
    "clEnqueueSVMMigrateMem",
    "clEnqueueUnmapMemObject",
    "clEnqueueWaitForEvents",
    "clEnqueueWriteImage",
    "clGetCommandQueueInfo",
    "clGetEventInfo",
    "clGetEventProfilingInfo",
    "clGetProgramInfo",
    "clLinkProgram",
    "clSVMAlloc",
    "clSVMFree",
    "clSetContextDestructorCallback",
    "clSetEventCallback",
    "clSetKernelArg",
    "clSetKernelArgSVMPointer",
    "clSetKernelExecInfo",
    "clSetMemObjectDestructorCallback",
    "clSetProgramReleaseCallback",
    "clSetProgramSpecializationConstant",
];

/// Commands of the library that the server calls for itself.
const OWN: &[&str] = &["clGetEventInfo"];

/// Commands that the server carries out by others of the library's.
const BY_OTHERS: &[&str] = &[
    "clCreateImage2D",
    "clCreateImage3D",
    "clEnqueueMapBuffer",
    "clEnqueueMapImage",
    "clEnqueueUnmapMemObject",
    "clEnqueueWaitForEvents",
];

/// Commands that are refused: queues' properties are fixed since OpenCL 1.1, whose drivers need not have the function; what the client does
/// with shared virtual memory itself, by copies and by markers, needs no command of the back end's.
const REFUSED: &[&str] = &[
    "clSetCommandQueueProperty",
    "clEnqueueSVMFree",
    "clEnqueueSVMMap",
    "clEnqueueSVMUnmap",
];

/// Commands that return nothing at all.
const VOID: &[&str] = &["clSVMFree"];

/// Whether the server has it carried out at all.
fn is_carried_out(command: &Command) -> bool {
    !REFUSED.contains(&command.name.as_str())
}

/// Whether a back end is asked for its function.
fn is_in_table(command: &Command) -> bool {
    let own = OWN.contains(&command.name.as_str());
    let served = matches!(command.service, Service::Generated | Service::Manual(_));
    let by_others = BY_OTHERS.contains(&command.name.as_str());
    served && !by_others && (own || (command.crosses() && is_carried_out(command)))
}

/// The module of the table of functions.
pub(crate) fn functions(api: &Api) -> String {
    let mut text = format!(
        "{HEAD}//! What a back end of {} is: its functions by their names in C. All that C has as an object or as a pointer is one.\n\n\
         use crate::api::{{P, functions}};\n\nfunctions! {{\n",
        api.name
    );
    for command in api.commands.iter().filter(|command| is_in_table(command)) {
        _ = writeln!(text, "    {};", signature(command));
    }
    text.push_str("}\n");
    text
}

/// Such as `clFinish(command_queue: P) -> i32`.
pub(crate) fn signature(command: &Command) -> String {
    let (returned, params): (Vec<_>, Vec<_>) = command.params.iter().partition(|param| param.name == "returned");
    let params: Vec<_> = (params.iter())
        .map(|param| format!("{}: {}", param.name, c_type(param)))
        .collect();
    let result = match returned.is_empty() {
        _ if VOID.contains(&command.name.as_str()) => "()",
        true => "i32",
        false => "P",
    };
    format!("{}({}) -> {result}", command.name, params.join(", "))
}

/// What crosses to C: numbers by value, and pointers.
fn c_type(param: &Param) -> &'static str {
    match &param.kind {
        Kind::Scalar { element, .. } => match element {
            Element::Byte => "u8",
            Element::I32 => "i32",
            Element::U32 => "u32",
            Element::I64 => "i64",
            Element::U64 => "u64",
            Element::Handle(_) | Element::Struct(_) => "P",
        },
        _ => "P",
    }
}

/// All commands that a back end is asked for.
pub(crate) fn in_table(api: &Api) -> impl Iterator<Item = &Command> {
    api.commands.iter().filter(|command| is_in_table(command))
}

/// The module of all calls: which function carries out which, and whose queue it is.
pub(crate) fn root(api: &Api, groups: &[(&str, Vec<Crossing<'_>>)]) -> String {
    let mut text = format!(
        "{HEAD}//! How calls of {} are carried out by a back end. One module for each file of annotations that has calls whose body is \
         not by hand.\n#![allow(unsafe_code, reason = \"calls functions of a C API; each block says which obligations it rests on\")]\n\n",
        api.name
    );
    let mut arms = String::new();
    let mut queues = String::new();
    let mut modules = vec!["api", "null"];
    for (name, crossings) in groups {
        for Crossing { command, .. } in crossings {
            let variant = names::command(api, &command.name);
            let function = snake(&variant);
            let place = match (is_carried_out(command), BY_HAND.contains(&command.name.as_str())) {
                (false, _) => "refused".to_owned(),
                (true, true) => format!("crate::manual::{function}"),
                (true, false) => format!("{name}::{function}"),
            };
            _ = writeln!(arms, "    {variant} => {place};");
            if let Some(queue) = queue_of(command) {
                _ = writeln!(queues, "    {variant} {queue} {};", work(command));
            }
            if place.starts_with(name) && !modules.contains(name) {
                modules.push(name);
            }
        }
    }
    modules.sort_unstable();
    for module in modules {
        let public = if module == "api" || module == "null" {
            "pub(crate) "
        } else {
            ""
        };
        _ = writeln!(text, "{public}mod {module};");
    }
    _ = write!(
        text,
        "\nuse crate::dispatch::{{dispatch, queues, refused}};\n\ndispatch! {{\n{arms}}}\n\nqueues! {{\n{queues}}}\n"
    );
    text
}

/// The parameter whose queue an error of the command is told by.
fn queue_of(command: &Command) -> Option<&str> {
    let in_queue = command.name.starts_with("clEnqueue") || command.name == "clFinish" || command.name == "clFlush";
    let is_queue = |param: &&Param| matches!(&param.kind, Kind::Handle { c_type, life: Life::Use } if c_type == "cl_command_queue");
    let found = command.params.iter().find(is_queue).filter(|_| in_queue);
    found.map(|param| param.name.as_str())
}

/// What a command in a queue is for the device, by the name of a constant of `accel/server`.
fn work(command: &Command) -> &'static str {
    match command.name.as_str() {
        "clFinish"
        | "clFlush"
        | "clEnqueueBarrier"
        | "clEnqueueBarrierWithWaitList"
        | "clEnqueueMarker"
        | "clEnqueueMarkerWithWaitList"
        | "clEnqueueWaitForEvents" => "NONE",
        "clEnqueueNDRangeKernel" | "clEnqueueTask" | "clEnqueueNativeKernel" => "LAUNCH",
        _ => "TRANSFER",
    }
}

/// The module of one group; nothing if all of it is by hand.
pub(crate) fn group(api: &Api, name: &str, crossings: &[Crossing<'_>]) -> Option<String> {
    let mut body = String::new();
    let mut types = vec![];
    for crossing in crossings {
        let command = crossing.command;
        if !is_carried_out(command) || BY_HAND.contains(&command.name.as_str()) {
            continue;
        }
        types.push(crossing.call_type(api, "").replace("<>", ""));
        if !crossing.layout.reply.is_empty() {
            types.push(crossing.reply_type(api, "").replace("<>", ""));
        }
        Body::new(api, crossing).write(&mut body);
    }
    if body.is_empty() {
        return None;
    }
    let mut text = format!(
        "{HEAD}//! Calls of `accel/spec/{}/{name}.toml`, carried out.\n\n",
        api.name
    );
    if body.contains("List::") {
        text.push_str("use accel_proto::List;\n");
    }
    _ = writeln!(text, "use accel_proto::opencl::{{{}}};\n", types.join(", "));
    text.push_str("use crate::api::{Code, check};\n");
    let helpers = ["Answer", "Bytes", "Place", "Places", "ask", "text", "there"];
    let used: Vec<_> = helpers
        .into_iter()
        .filter(|name| {
            [" {}::", " {}(", "({}("]
                .iter()
                .any(|form| body.contains(&form.replace("{}", name)))
        })
        .collect();
    if !used.is_empty() {
        _ = writeln!(text, "use crate::marshal::{{{}}};", used.join(", "));
    }
    if body.contains("Sort::") {
        text.push_str("use crate::objects::Sort;\n");
    }
    text.push_str("use crate::session::Session;\n\n");
    Some(text + &body)
}

/// `EnqueueNDRangeKernel` as `enqueue_nd_range_kernel`.
pub(crate) fn snake(name: &str) -> String {
    let name = name.replace("IDs", "Ids").replace("2D", "2d").replace("3D", "3d");
    let chars: Vec<char> = name.chars().collect();
    let mut snake = String::new();
    for (index, char) in chars.iter().enumerate() {
        let after_small = index > 0 && !chars[index - 1].is_uppercase();
        let before_small = index > 0 && chars.get(index + 1).is_some_and(|next| next.is_lowercase());
        if char.is_uppercase() && (after_small || before_small) {
            snake.push('_');
        }
        snake.push(char.to_ascii_lowercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_rust_has_them() {
        for (name, expected) in [
            ("EnqueueNDRangeKernel", "enqueue_nd_range_kernel"),
            ("GetPlatformIDs", "get_platform_ids"),
            ("CreateProgramWithIL", "create_program_with_il"),
            ("CreateImage2D", "create_image2d"),
            ("Flush", "flush"),
        ] {
            assert_eq!(snake(name), expected);
        }
    }

    #[test]
    fn what_is_by_hand_is_a_command_that_crosses() {
        let api = accel_spec::opencl(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).unwrap();
        for name in BY_HAND {
            let found = api.commands.iter().find(|command| command.name == *name);
            assert!(
                found.is_some_and(|command| command.crosses() && is_carried_out(command)),
                "{name}"
            );
        }
    }
}
