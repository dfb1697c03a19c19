//! What is wrong is refused with file, function, parameter and what to do; what is checked in is read.

use std::path::Path;

use super::*;

const HEAD: &str = "[library]\nfiles = [\"libx.so.1\"]\nversions = [\"libx.so.1\"]\nnot_served = \"X_NO\"\n[types]\nx_t = \"handle\"\n\
    d_t = \"descriptor\"\n[enums.s_t]\nX_NO = 7\nX_YES = 0\n";

fn read(text: &str) -> Result<Cuda, String> {
    let text = format!("{HEAD}{text}");
    resolve::resolve(&[("accel/spec/cuda/x.toml", &text)]).map_err(|error| error.to_string())
}

#[test]
fn the_trees_own_annotations_are_read() {
    let cuda = cuda(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).unwrap();
    let library = |name: &str| cuda.libraries.iter().find(|library| library.name == name).unwrap();
    let function = |of: &str, name: &str| {
        library(of)
            .functions
            .iter()
            .find(|function| function.name == name)
            .unwrap()
            .clone()
    };
    assert_eq!(function("cublas", "cublasSgemm_v2").body, Body::Send { repeats: false });
    assert_eq!(
        function("cudnn", "cudnnSetFilterNdDescriptor").body,
        Body::SetDescriptor { key: None }
    );
    assert_eq!(function("cudart", "cudaGraphLaunch").body, Body::NotServed(801));
    assert_eq!(library("cudart").not_served, ("cudaErrorNotSupported".to_owned(), 801));
    assert_eq!(
        function("nvshmem", "nvshmem_malloc").body,
        Body::NotServed(0),
        "an address is NULL"
    );
    let gemm = cuda
        .api
        .commands
        .iter()
        .find(|command| command.name == "cublasSgemm_v2")
        .unwrap();
    assert_eq!(gemm.params.len(), 14);
    assert_eq!(gemm.effects.len(), 4, "the handle, and three matrices");
}

#[test]
fn words_that_do_not_fit_are_refused_with_their_place() {
    let function =
        |words: &str| format!("[functions.xGo]\nc = \"s_t (x_t handle, int n, const float *a, d_t d)\"\n{words}\n");
    let cases = [
        ("flow = \"later\"", "", "flow: \"later\" is none of"),
        ("flow = \"async\"", "a", "is a pointer; say device"),
        ("flow = \"local\"", "", "nothing is generated for it"),
        (
            "flow = \"async\"\nparams.b = \"device\"",
            "b",
            "is no parameter of its declaration",
        ),
        (
            "flow = \"async\"\nparams.a = \"create\"",
            "a",
            "create does not fit its type",
        ),
        ("flow = \"async\"\nparams.a = \"lamp\"", "a", "\"lamp\" is no word"),
        (
            "flow = \"async\"\nparams.a = { in = \"m\" }",
            "m",
            "a length is computed from it",
        ),
        (
            "flow = \"async\"\nparams.a = { in = \"1\", out = \"1\" }",
            "a",
            "has two of",
        ),
        (
            "flow = \"async\"\nparams.a = { scalar = \"m\" }",
            "a",
            "neither a number of bytes nor a parameter",
        ),
        (
            "flow = \"async\"\nparams.a = \"out\"",
            "",
            "is not waited for and gives something back",
        ),
        (
            "flow = \"local\"\ndescriptor = \"set\"",
            "",
            "whose first parameter is a descriptor",
        ),
        ("flow = \"local\"\nby_hand = \"\"", "", "by_hand is empty"),
        (
            "flow = \"sync\"\nrepeats = true\nparams.a = \"device\"",
            "",
            "repeats is for",
        ),
        (
            "flow = \"async\"\nparams.a = \"device\"\nonly = [\"libx.so.2\"]",
            "",
            "libx.so.2 is no version",
        ),
        (
            "flow = \"local\"\nby_hand = \"x\"\ntakes = [\"b\"]",
            "b",
            "takes: is no parameter",
        ),
        (
            "flow = \"local\"\nby_hand = \"x\"\ntogether = [[\"n\", \"a\"]]",
            "",
            "are not parameters of one type",
        ),
    ];
    for (words, parameter, part) in cases {
        let error = read(&function(words)).unwrap_err();
        assert!(
            error.starts_with("accel/spec/cuda/x.toml: xGo: ") && error.contains(part),
            "{words}: {error}"
        );
        assert!(
            parameter.is_empty() || error.contains(&format!("parameter {parameter}: ")),
            "{words}: {error}"
        );
    }
    let unknown = read("[functions.xGo]\nc = \"s_t (lamp_t a)\"\nflow = \"local\"\nby_hand = \"x\"\n").unwrap_err();
    assert!(unknown.contains("parameter a: lamp_t is no type"), "{unknown}");
    let twice =
        read("[not_served]\nnames = [\"xGo\"]\n[functions.xGo]\nc = \"s_t (void)\"\nflow = \"sync\"\n").unwrap_err();
    assert!(twice.contains("xGo: is there twice"), "{twice}");
    let word = read("[functions.xGo]\nc = \"s_t (void)\"\nflow = \"sync\"\nlamp = 1\n").unwrap_err();
    assert!(word.contains("lamp") && word.contains("README.md"), "{word}");
}

#[test]
fn names_are_written_as_rust_writes_them() {
    for (name, expected) in [
        ("devPtr", "dev_ptr"),
        ("A", "a"),
        ("Atype", "atype"),
        ("type", "type_"),
        ("workSpaceSizeInBytes", "work_space_size_in_bytes"),
    ] {
        assert_eq!(snake(name), expected);
    }
}
