//! Names of C in the form that Rust has them.
//!
//! Knows no command.

use accel_spec::{Api, Element};

/// `clEnqueueWriteBuffer` as `EnqueueWriteBuffer`; where an API's libraries have no prefix in common, `cublasSgemm_v2` as `CublasSgemmV2`.
pub(crate) fn command(api: &Api, c_name: &str) -> String {
    if api.prefix.is_empty() {
        return words(c_name);
    }
    c_name.strip_prefix(api.prefix.as_str()).unwrap_or(c_name).to_owned()
}

/// `cl_command_queue` as `CommandQueue`, `cl_device_id` as `Device`.
pub(crate) fn c_type(api: &Api, name: &str) -> String {
    let name = name.strip_prefix(&format!("{}_", api.prefix)).unwrap_or(name);
    let name = name.strip_suffix("_id").unwrap_or(name);
    words(name)
}

/// Words between underscores as one name of a type.
fn words(name: &str) -> String {
    let words = name.split('_').map(|word| {
        let mut chars = word.chars();
        let first = chars.next().map(|first| first.to_ascii_uppercase());
        first.into_iter().chain(chars).collect::<String>()
    });
    words.collect()
}

/// The type of one element.
pub(crate) fn element(api: &Api, element: &Element) -> String {
    match element {
        Element::Byte => "u8".into(),
        Element::I32 => "i32".into(),
        Element::U32 => "u32".into(),
        Element::I64 => "i64".into(),
        Element::U64 => "u64".into(),
        Element::Handle(name) => handle(api, name),
        Element::Struct(name) => c_type(api, name),
    }
}

/// The type of a handle.
pub(crate) fn handle(api: &Api, name: &str) -> String {
    format!("Handle<{}>", c_type(api, name))
}
