//! Images for the lab's store. They are named by digest, so what is there under its name is right.

use std::fs::File;
use std::net::TcpStream;

use agent_api::{Connection, OsText, Upload};
use anyhow::{Context, Result};
use observe::span::span;

use super::DURING;
use crate::bar::{Bar, Shown};
use crate::images::Opened;
use crate::output::Output;

/// Where the images are in the lab.
const IMAGES: &str = "/var/lib/basalt/images";

/// Sends the image's files that the lab lacks.
pub(super) fn send_image(connection: &mut Connection<TcpStream>, image: &Opened, output: &Output) -> Result<()> {
    let _span = span("lab: image compared");
    for file in image.files() {
        let target = format!("{IMAGES}/{}", file.name);
        let local = File::open(&file.path).with_context(|| format!("{} cannot be read", file.path.display()))?;
        let size = local.metadata()?.len();
        let there = connection.stat(target.as_str(), false).context(DURING)?;
        if there.is_some_and(|there| there.size == size) {
            continue;
        }
        if size > 1 << 20 {
            output.note(&format!("sending the image to the lab ({})", base::ByteSize(size)));
        }
        let upload = Upload {
            path: OsText::from(target.as_str()),
            mode: 0o600,
            size,
        };
        connection
            .upload(
                &upload,
                &mut Shown::new(&local, Bar::new(output), "sending the image", size),
            )
            .context(DURING)?;
    }
    Ok(())
}
