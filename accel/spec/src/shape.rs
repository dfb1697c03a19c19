//! The shape of an API: names, C types, constants and versions, as `cl.xml` has them.
//!
//! Knows nothing of directions, lengths or lives: the registry has none.

use std::collections::{BTreeMap, HashMap};

use roxmltree::{Document, Node, ParsingOptions};

use crate::error::SpecError;
use crate::model::Element;

/// What the registry says.
#[derive(Debug, Default)]
pub(crate) struct Shape {
    /// Commands by name.
    pub(crate) commands: HashMap<String, CommandShape>,
    /// Commands of the core, with the version that brought each: by version, then in the registry's order.
    pub(crate) core: Vec<(String, String)>,
    /// Which extension brought a command.
    pub(crate) extensions: HashMap<String, String>,
    /// C types of objects, in the registry's order.
    pub(crate) handles: Vec<String>,
    /// Structures, in the registry's order.
    pub(crate) structs: BTreeMap<String, Vec<(String, CType)>>,
    /// Constants.
    pub(crate) constants: HashMap<String, i64>,
    typedefs: HashMap<String, String>,
}

/// A command's declaration.
#[derive(Debug)]
pub(crate) struct CommandShape {
    /// What it returns.
    pub(crate) returns: CType,
    /// Names and types.
    pub(crate) params: Vec<(String, CType)>,
}

/// A C type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CType {
    /// The name beneath all stars.
    pub(crate) name: String,
    /// How many stars and brackets.
    pub(crate) pointers: usize,
    /// Whether what is pointed to cannot be written.
    pub(crate) constant: bool,
    /// Whether it is a function.
    pub(crate) function: bool,
    /// As it is written.
    pub(crate) text: String,
}

impl Shape {
    /// Reads a registry.
    ///
    /// # Errors
    ///
    /// What is no XML, or lacks what this reads.
    pub(crate) fn parse(file: &str, text: &str) -> Result<Self, SpecError> {
        let wrong = |what: String| SpecError::Shape {
            file: file.to_owned(),
            what,
        };
        let options = ParsingOptions {
            nodes_limit: 1_000_000,
            ..ParsingOptions::default()
        };
        let document = Document::parse_with_options(text, options).map_err(|error| wrong(error.to_string()))?;
        let root = document.root_element();
        let mut shape = Self::default();
        for node in children(root, "types").flat_map(|types| children(types, "type")) {
            shape.read_type(node);
        }
        for node in children(root, "enums").flat_map(|enums| children(enums, "enum")) {
            if let Some((name, value)) = constant(node) {
                shape.constants.insert(name, value);
            }
        }
        for node in children(root, "commands").flat_map(|commands| children(commands, "command")) {
            let read = command(node).ok_or_else(|| {
                let line = document.text_pos_at(node.range().start).row;
                wrong(format!("line {line}: a command without a name or a type"))
            })?;
            shape.commands.insert(read.0, read.1);
        }
        for feature in children(root, "feature") {
            let version = feature.attribute("number").unwrap_or_default();
            for name in required(feature) {
                if !shape.core.iter().any(|(known, _)| *known == name) {
                    shape.core.push((name, version.to_owned()));
                }
            }
        }
        for extension in children(root, "extensions").flat_map(|all| children(all, "extension")) {
            let by = extension.attribute("name").unwrap_or_default();
            for name in required(extension) {
                shape.extensions.entry(name).or_insert_with(|| by.to_owned());
            }
        }
        if shape.core.is_empty() {
            return Err(wrong("it has no feature with commands".into()));
        }
        Ok(shape)
    }

    fn read_type(&mut self, node: Node<'_, '_>) {
        let text = all_text(node);
        if node.attribute("category") == Some("struct") {
            let name = node.attribute("name").unwrap_or_default().to_owned();
            let members = children(node, "member").filter_map(member).collect();
            self.structs.insert(name, members);
            return;
        }
        let Some(name) = child_text(node, "name") else {
            return;
        };
        if text.starts_with("typedef struct _") && text.contains('*') {
            self.handles.push(name);
        } else if let Some(base) = child_text(node, "type").filter(|_| text.starts_with("typedef")) {
            self.typedefs.insert(name, base);
        }
    }

    /// What a value of the type is; `None` for what has no size.
    pub(crate) fn element(&self, name: &str) -> Option<Element> {
        let mut name = name;
        // A chain of definitions is short; what is longer is a circle.
        for _ in 0..8 {
            if self.handles.iter().any(|handle| handle == name) {
                return Some(Element::Handle(name.to_owned()));
            }
            if self.structs.contains_key(name) {
                return Some(Element::Struct(name.to_owned()));
            }
            match name {
                "void" | "char" | "unsigned char" | "cl_uchar" | "cl_char" => return Some(Element::Byte),
                "int32_t" | "cl_int" => return Some(Element::I32),
                "uint32_t" | "cl_uint" => return Some(Element::U32),
                "intptr_t" | "int64_t" | "cl_long" => return Some(Element::I64),
                "size_t" | "uint64_t" | "cl_ulong" => return Some(Element::U64),
                _ => name = self.typedefs.get(name)?,
            }
        }
        None
    }
}

fn children<'a, 'input: 'a>(node: Node<'a, 'input>, name: &'static str) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children().filter(move |child| child.has_tag_name(name))
}

fn child_text(node: Node<'_, '_>, name: &'static str) -> Option<String> {
    children(node, name).next().map(all_text)
}

/// All text below a node, blanks made one.
fn all_text(node: Node<'_, '_>) -> String {
    let text: Vec<&str> = (node.descendants())
        .filter(|inner| inner.is_text())
        .filter_map(|inner| inner.text())
        .collect();
    text.concat().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Names of the commands that a feature or an extension requires.
fn required<'a, 'input: 'a>(node: Node<'a, 'input>) -> impl Iterator<Item = String> {
    children(node, "require")
        .flat_map(|require| children(require, "command"))
        .filter_map(|command| command.attribute("name").map(str::to_owned))
}

fn constant(node: Node<'_, '_>) -> Option<(String, i64)> {
    let name = node.attribute("name")?.to_owned();
    if let Some(bit) = node.attribute("bitpos") {
        return Some((name, 1_i64.checked_shl(bit.parse().ok()?)?));
    }
    let value = node.attribute("value")?;
    let number = match value.strip_prefix("0x") {
        Some(digits) => i64::from_str_radix(digits, 16).ok()?,
        None => value.parse().ok()?,
    };
    Some((name, number))
}

fn command(node: Node<'_, '_>) -> Option<(String, CommandShape)> {
    let proto = children(node, "proto").next()?;
    let name = child_text(proto, "name")?;
    let params: Option<Vec<_>> = children(node, "param").map(declared).collect();
    let shape = CommandShape {
        returns: c_type(proto)?,
        params: params?,
    };
    Some((name, shape))
}

fn declared(node: Node<'_, '_>) -> Option<(String, CType)> {
    Some((child_text(node, "name")?, c_type(node)?))
}

/// The last member of a union stands for it: `cl_image_desc` has one whose members are two names for one object.
fn member(node: Node<'_, '_>) -> Option<(String, CType)> {
    if let Some(named) = declared(node) {
        return Some(named);
    }
    let text = all_text(node);
    let last = text
        .trim_end_matches(['}', ' '])
        .trim_end_matches(';')
        .rsplit(['{', ';'])
        .next()?;
    let (base, name) = last.trim().rsplit_once(' ')?;
    let c_type = CType {
        name: base.trim().to_owned(),
        pointers: 0,
        constant: false,
        function: false,
        text: last.trim().to_owned(),
    };
    Some((name.to_owned(), c_type))
}

fn c_type(node: Node<'_, '_>) -> Option<CType> {
    let text = all_text(node);
    let function = text.contains("CL_CALLBACK");
    let name = match child_text(node, "type") {
        Some(name) => name,
        None if function => "void".to_owned(),
        // `const unsigned char**` has no element of its own for its type in some places.
        None => text.split(['*', '[']).next()?.trim().to_owned(),
    };
    Some(CType {
        name,
        pointers: if function { 1 } else { text.matches(['*', '[']).count() },
        constant: text.starts_with("const "),
        function,
        text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry() -> Shape {
        Shape::parse("cl.xml", include_str!("../opencl/cl.xml")).unwrap()
    }

    #[test]
    fn the_registry_is_read() {
        let shape = registry();
        assert_eq!(shape.core.len(), 115);
        let write = &shape.commands["clEnqueueWriteBuffer"];
        let (name, pointer) = &write.params[5];
        assert!(name == "ptr" && pointer.pointers == 1 && pointer.constant && !pointer.function);
        assert_eq!(shape.commands["clGetPlatformIDs"].returns.pointers, 0);
        assert!(shape.commands["clCreateContext"].params[3].1.function);
        assert_eq!(shape.commands["clCreateProgramWithBinary"].params[4].1.pointers, 2);
        assert_eq!(shape.constants["CL_INVALID_OPERATION"], -59);
        assert_eq!(shape.constants["CL_CONTEXT_PLATFORM"], 0x1084);
        assert_eq!(shape.extensions["clIcdGetPlatformIDsKHR"], "cl_khr_icd");
    }

    #[test]
    fn definitions_end_at_what_has_a_size() {
        let shape = registry();
        for (name, element) in [
            ("cl_bool", Element::U32),
            ("cl_mem_flags", Element::U64),
            ("cl_context_properties", Element::I64),
            ("size_t", Element::U64),
            ("cl_mem", Element::Handle("cl_mem".into())),
            ("cl_image_desc", Element::Struct("cl_image_desc".into())),
        ] {
            assert_eq!(shape.element(name), Some(element), "{name}");
        }
        assert_eq!(shape.element("ID3D10Buffer"), None);
        let (name, union) = shape.structs["cl_image_desc"].last().unwrap();
        assert!(name == "mem_object" && union.name == "cl_mem");
    }

    #[test]
    fn what_is_no_registry_is_refused_with_its_place() {
        let error = Shape::parse("x.xml", "<registry><types></registry>")
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("x.xml: ") && error.contains("1:"), "{error}");
        let error = Shape::parse("x.xml", "<registry/>").unwrap_err().to_string();
        assert!(error.contains("no feature"), "{error}");
        let error = Shape::parse("x.xml", "<registry><commands><command/></commands></registry>");
        assert!(error.unwrap_err().to_string().contains("line 1"));
    }
}
