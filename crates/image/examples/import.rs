//! `import IMAGE STORE [NAME]`: imports an image into a store and prints where it is. For work on this crate and for
//! tests that need another process; people use `basalt import`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [image, store, name @ ..] = arguments.as_slice() else {
        eprintln!("usage: import IMAGE STORE [NAME]");
        return ExitCode::from(2);
    };
    let imported = image::Store::open(Path::new(store))
        .and_then(|store| store.import(Path::new(image), name.first().map(String::as_str), &mut |_| {}));
    match imported {
        Ok(image) => {
            eprintln!(
                "{} {:?} {} bytes {:?}",
                image.path.display(),
                image.names,
                image.size,
                image.config
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            let source = std::error::Error::source(&error)
                .map(|source| format!(": {source}"))
                .unwrap_or_default();
            eprintln!("import: {error}{source}");
            ExitCode::FAILURE
        }
    }
}
