//! Queries of the form `clGet…Info`: what the client knows itself, what it has kept, and what it asks for. Knows names of parameters of
//! queries, and neither rings nor how a query is asked.

use accel_proto::Sort;
use accel_proto::opencl::{self as calls, table::COMMANDS};

use crate::arguments::Out;
use crate::codes::Code;
use crate::connection::Connection;
use crate::object::{Data, Object};

/// The longest answer that is asked for: with its head it fits into a message.
const LONGEST: u64 = (accel_proto::MESSAGE - 64) as u64;

/// Extensions whose functions this library has not: names, or how they begin.
const NOT_SERVED: &[&str] = &[
    "cl_khr_gl_",
    "cl_khr_d3d",
    "cl_khr_dx9",
    "cl_khr_egl",
    "cl_khr_terminate_context",
    "cl_khr_command_buffer",
    "cl_khr_semaphore",
    "cl_khr_external",
    "cl_khr_icd",
    "cl_ext_",
    "cl_arm_",
    "cl_img_",
    "cl_intel_",
    "cl_pocl_",
    "cl_qcom_",
    "cl_apple_",
];

/// `cl_name_version`: a number, and a name that is filled with zeroes.
const NAME_VERSION: usize = 4 + 64;

/// A query about an object.
pub(crate) struct Query<'a> {
    pub(crate) command: &'static str,
    pub(crate) object: &'a Object,
    pub(crate) param_name: u32,
    /// What else the answer depends on.
    pub(crate) depends: Vec<u64>,
    /// Whether the answer stays.
    pub(crate) keeps: bool,
}

/// Where the answer goes.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) size: u64,
    pub(crate) value: Out<u8>,
    pub(crate) size_ret: Out<u64>,
}

impl Wanted {
    /// Gives an answer to the application.
    pub(crate) fn give(self, answer: &[u8]) -> Result<(), Code> {
        let length = answer.len() as u64;
        if !self.value.is_null() && self.size < length {
            return Err(Code::INVALID_VALUE);
        }
        self.value.put_bytes(answer, self.size);
        self.size_ret.put(length);
        Ok(())
    }
}

impl Query<'_> {
    /// Answers it; `ask` asks the server, for at most so many bytes.
    pub(crate) fn answer(
        mut self,
        wanted: Wanted,
        ask: impl FnOnce(&'static Connection, u64) -> Result<Vec<u8>, Code>,
    ) -> Result<(), Code> {
        if self.keeps {
            let key = (self.param_name, std::mem::take(&mut self.depends));
            if let Some(given) = self.object.with_answer(&key, |answer| wanted.give(answer)) {
                return given;
            }
            self.depends = key.1;
        }
        wanted.give(&self.value(ask)?)
    }

    /// The answer.
    pub(crate) fn value(
        self,
        ask: impl FnOnce(&'static Connection, u64) -> Result<Vec<u8>, Code>,
    ) -> Result<Vec<u8>, Code> {
        if let Some(own) = own(self.object, self.param_name) {
            return Ok(own);
        }
        let key = (self.param_name, self.depends);
        if self.keeps
            && let Some(kept) = self.object.with_answer(&key, <[u8]>::to_vec)
        {
            return Ok(kept);
        }
        let connection = self.object.connection()?;
        let mut answer = ask(connection, LONGEST)?;
        translate(connection, self.command, self.param_name, &mut answer);
        let answer = adjusted(self.object.sort(), self.param_name, answer);
        if self.keeps {
            self.object.keep_answer(key, &answer);
        }
        Ok(answer)
    }
}

/// Names of the server's within an answer become the application's objects.
fn translate(connection: &Connection, command: &str, param_name: u32, answer: &mut [u8]) {
    let known = COMMANDS.iter().find(|known| known.name == command);
    let mut objects = known.into_iter().flat_map(|known| known.objects);
    let found = objects.find(|(value, _)| *value == i64::from(param_name));
    let Some(sort) = found.and_then(|(_, c_type)| Sort::of(c_type)) else {
        return;
    };
    for name in answer.as_chunks_mut::<8>().0 {
        let raw = u32::try_from(u64::from_ne_bytes(*name)).unwrap_or_default();
        *name = connection.object(sort, raw).address().to_ne_bytes();
    }
}

/// An address as it stands in an answer.
fn address(object: Option<&Object>) -> Vec<u8> {
    let address = object.map_or(0, |object| object.as_ref().address());
    address.to_ne_bytes().to_vec()
}

/// What the client knows. Numbers are the API's (cl.h); those of one kind of objects differ whatever the query.
fn own(object: &Object, param_name: u32) -> Option<Vec<u8>> {
    let references = || Some(object.references().max(1).to_ne_bytes().to_vec());
    match (object.sort(), param_name) {
        // CL_*_REFERENCE_COUNT
        (Sort::Context, 0x1080)
        | (Sort::CommandQueue, 0x1092)
        | (Sort::Mem, 0x1105)
        | (Sort::Sampler, 0x1150)
        | (Sort::Program, 0x1160)
        | (Sort::Kernel, 0x1192)
        | (Sort::Event, 0x11d2) => references(),
        // CL_DEVICE_REFERENCE_COUNT: of devices that are there anyway it is 1.
        (Sort::Device, 0x1047) => references(),
        // CL_QUEUE_CONTEXT, CL_MEM_CONTEXT, CL_SAMPLER_CONTEXT, CL_PROGRAM_CONTEXT, CL_KERNEL_CONTEXT, CL_EVENT_CONTEXT
        (Sort::CommandQueue, 0x1090)
        | (Sort::Mem, 0x1106)
        | (Sort::Sampler, 0x1151)
        | (Sort::Program, 0x1161)
        | (Sort::Kernel, 0x1193)
        | (Sort::Event, 0x11d4) => Some(address(object.parent::<calls::Context>())),
        // CL_KERNEL_PROGRAM
        (Sort::Kernel, 0x1194) => Some(address(object.parent::<calls::Program>())),
        // CL_EVENT_COMMAND_QUEUE, which of a user event is NULL
        (Sort::Event, 0x11d0) => Some(address(object.parent::<calls::CommandQueue>())),
        // CL_CONTEXT_PROPERTIES
        (Sort::Context, 0x1082) => match &object.data {
            Data::Context(properties) => Some(properties.iter().flat_map(|one| one.to_ne_bytes()).collect()),
            _ => None,
        },
        (Sort::Mem, _) => match &object.data {
            Data::Mem(state) => state.own(param_name),
            _ => None,
        },
        // CL_PLATFORM_ICD_SUFFIX_KHR
        (Sort::Platform, 0x0920) => Some(b"BSLT\0".to_vec()),
        _ => None,
    }
}

/// What this library cannot do is not said, and what it does is.
fn adjusted(sort: Sort, param_name: u32, mut answer: Vec<u8>) -> Vec<u8> {
    match (sort, param_name) {
        // CL_DEVICE_EXECUTION_CAPABILITIES: no CL_EXEC_NATIVE_KERNEL, whose code would be the client's.
        (Sort::Device, 0x1029) => {
            if let Some(first) = answer.first_mut() {
                *first &= !2;
            }
            answer
        }
        // CL_DEVICE_SVM_CAPABILITIES: CL_DEVICE_SVM_COARSE_GRAIN_BUFFER alone, as memory of both sides is one only while it is mapped.
        (Sort::Device, 0x1053) => {
            let bits = answer.first().map_or(0, |bits| u64::from(bits & 1));
            bits.to_ne_bytes().to_vec()
        }
        // CL_PLATFORM_EXTENSIONS, CL_DEVICE_EXTENSIONS
        (Sort::Platform, 0x0904) => names(&answer, Some("cl_khr_icd")),
        (Sort::Device, 0x1030) => names(&answer, None),
        // CL_PLATFORM_EXTENSIONS_WITH_VERSION, CL_DEVICE_EXTENSIONS_WITH_VERSION
        (Sort::Platform, 0x0907) => {
            let mut kept = versions(&answer);
            let mut own = [0; NAME_VERSION];
            // CL_MAKE_VERSION(1, 0, 0)
            own[..4].copy_from_slice(&(1_u32 << 22).to_ne_bytes());
            own[4..14].copy_from_slice(b"cl_khr_icd");
            kept.extend(own);
            kept
        }
        (Sort::Device, 0x1060) => versions(&answer),
        _ => answer,
    }
}

fn is_served(extension: &str) -> bool {
    !NOT_SERVED.iter().any(|begin| extension.starts_with(begin))
}

/// Names of extensions, with blanks between them.
fn names(answer: &[u8], own: Option<&str>) -> Vec<u8> {
    let text = String::from_utf8_lossy(answer);
    let kept = text
        .trim_end_matches('\0')
        .split_whitespace()
        .filter(|name| is_served(name));
    let kept: Vec<&str> = kept.chain(own).collect();
    let mut bytes = kept.join(" ").into_bytes();
    bytes.push(0);
    bytes
}

/// The same as a list of `cl_name_version`.
fn versions(answer: &[u8]) -> Vec<u8> {
    let entries = answer.chunks_exact(NAME_VERSION);
    let kept = entries.filter(|entry| is_served(String::from_utf8_lossy(&entry[4..]).trim_end_matches('\0')));
    kept.flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_without_their_functions_are_not_named() {
        let all = b"cl_khr_fp64 cl_khr_gl_sharing cl_khr_icd cl_intel_accelerator cl_khr_subgroups\0";
        assert_eq!(names(all, None), b"cl_khr_fp64 cl_khr_subgroups\0");
        assert_eq!(
            names(all, Some("cl_khr_icd")),
            b"cl_khr_fp64 cl_khr_subgroups cl_khr_icd\0"
        );
        assert_eq!(names(b"\0", None), b"\0");
        let entry = |name: &str| {
            let mut bytes = [0; NAME_VERSION];
            bytes[4..4 + name.len()].copy_from_slice(name.as_bytes());
            bytes
        };
        let list = [entry("cl_khr_fp16"), entry("cl_khr_egl_image")].concat();
        assert_eq!(versions(&list), entry("cl_khr_fp16"));
        assert_eq!(adjusted(Sort::Platform, 0x0907, list).len(), 2 * NAME_VERSION);
        assert_eq!(adjusted(Sort::Device, 0x1029, vec![3, 0]), [1, 0]);
        let capabilities = adjusted(Sort::Device, 0x1053, 0xf_u64.to_ne_bytes().to_vec());
        assert_eq!(capabilities, 1_u64.to_ne_bytes());
    }

    #[test]
    fn an_answer_goes_where_there_is_space_for_it() {
        let (mut value, mut size) = ([0_u8; 4], 0_u64);
        let out = |value: &mut [u8], size: &mut u64| Wanted {
            size: value.len() as u64,
            value: Out::of(value),
            size_ret: Out::of(std::slice::from_mut(size)),
        };
        out(&mut value, &mut size).give(&[7, 8]).unwrap();
        assert_eq!((value, size), ([7, 8, 0, 0], 2));
        assert_eq!(out(&mut value, &mut size).give(&[1; 5]), Err(Code::INVALID_VALUE));
    }
}
