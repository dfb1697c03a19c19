//! `pull LOCATION STORE`: pulls an image into a store and prints its digest. For work on this crate and for tests that need
//! another process; people use `basalt pull`.

use std::path::Path;
use std::process::ExitCode;

use registry::{Location, Options};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [location, store] = arguments.as_slice() else {
        eprintln!("usage: pull LOCATION STORE");
        return ExitCode::from(2);
    };
    let pulled = pull(location, Path::new(store));
    match pulled {
        Ok(pulled) => {
            eprintln!("{} from {} {:?}", pulled.image.digest, pulled.from, pulled.image.names);
            ExitCode::SUCCESS
        }
        Err(error) => {
            let source = std::error::Error::source(&error);
            eprintln!(
                "pull: {error}{}",
                source.map(|source| format!(": {source}")).unwrap_or_default()
            );
            ExitCode::FAILURE
        }
    }
}

fn pull(location: &str, store: &Path) -> Result<registry::Pull, registry::Error> {
    let location: Location = location.parse()?;
    let files = registry::credentials::files();
    let mut options = Options::default();
    options.registry.credentials = registry::credentials::find(location.host(), location.repository(), &files)?;
    registry::pull(&image::Store::open(store)?, &location, &options, &|_| {})
}
