//! `basalt pull` and `basalt push`: what crate `registry` is to do, and with whose credentials.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use image::{Image, Store};
use registry::{Cancel, Credentials, Location, Options, Peer, Pull, credentials};
use serde::Serialize;

use super::{Listed, line_of, short_name, store};
use crate::cli::{PullArgs, PullPolicy, PushArgs, RegistryArgs};
use crate::images::progress::Steps;
use crate::interrupt::until_signal;
use crate::output::Output;
use crate::places;

/// What has come, for machines.
#[derive(Debug, Serialize)]
struct Pulled<'a> {
    #[serde(flatten)]
    image: Listed<'a>,
    /// It was here before.
    known: bool,
    /// The registry or mirror that has sent it.
    from: &'a str,
}

/// `basalt pull`.
pub(crate) fn pull(args: &PullArgs, output: &Output) -> Result<u8> {
    let Way { location, options } = Way::new(&args.image, &args.source.registry, &args.source.mirror)?;
    let pulled = fetch(&store()?, &location, options, !args.quiet, output)?;
    let result = Pulled {
        image: Listed::from(&pulled.image),
        known: pulled.known,
        from: &pulled.from,
    };
    output.result(&result, || {
        if args.quiet {
            format!("sha256:{}\n", pulled.image.digest)
        } else {
            line_of(&pulled.image)
        }
    })?;
    Ok(0)
}

fn fetch(store: &Store, location: &Location, options: Options, tell: bool, output: &Output) -> Result<Pull> {
    let steps = Steps::new(output, "fetched", tell);
    until_signal(|cancel| {
        let options = with(options, cancel);
        Ok(registry::pull(store, location, &options, &|step| steps.show(step))?)
    })
}

fn with(options: Options, cancel: &Cancel) -> Options {
    Options {
        cancel: cancel.clone(),
        ..options
    }
}

/// A place in a registry, and how it is reached.
#[derive(Debug)]
pub(crate) struct Way {
    pub(crate) location: Location,
    options: Options,
}

impl Way {
    /// By what was written and given by hand.
    pub(crate) fn new(reference: &str, args: &RegistryArgs, mirrors: &[String]) -> Result<Self> {
        let location = location(reference)?;
        let mut options = options(args, &location)?;
        for mirror in mirrors {
            options.mirrors.push(peer(args, mirror, &location)?);
        }
        Ok(Self { location, options })
    }

    /// How, until it is cancelled.
    pub(crate) fn options(&self, cancel: &Cancel) -> Options {
        with(self.options.clone(), cancel)
    }
}

/// The image of a run, fetched first if `policy` says so; the name or digest by which it is here.
pub(crate) fn fetched(reference: &str, policy: PullPolicy, output: &Output) -> Result<String> {
    // With a digest the digest counts, and is what the store knows it by.
    let here = reference.split_once('@').map_or(reference, |(_, digest)| digest);
    let wanted = match policy {
        PullPolicy::Never => None,
        PullPolicy::Always => Some(location(reference)?),
        // The store is root's: what is missing there is the daemon's to say.
        PullPolicy::Missing if places::is_member() => None,
        PullPolicy::Missing => missing(reference, here)?,
    };
    let Some(location) = wanted else {
        return Ok(here.to_owned());
    };
    let args = RegistryArgs {
        creds: None,
        authfile: None,
        tls_verify: true,
        cert_dir: None,
    };
    let options = options(&args, &location)?;
    output.note(&format!("fetching {location}"));
    let pulled = fetch(&store()?, &location, options, true, output)?;
    // The digest may be that of an index, and is not the image's then.
    Ok(if here == reference {
        here.to_owned()
    } else {
        format!("sha256:{}", pulled.image.digest)
    })
}

/// Where an image comes from that is not here and whose name says so.
fn missing(reference: &str, here: &str) -> Result<Option<Location>> {
    // The usual short name need not even be looked for: that is up to whoever runs it.
    let Some(location) = reference.parse().ok().filter(is_elsewhere) else {
        return Ok(None);
    };
    match store()?.get(here) {
        Err(image::Error::NoSuchImage { .. }) => Ok(Some(location)),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(None),
    }
}

/// The store has names without a registry under `localhost`: that alone is no registry.
fn is_elsewhere(location: &Location) -> bool {
    location.host() != "localhost"
}

/// What was sent, for machines.
#[derive(Debug, Serialize)]
struct Pushed {
    destination: String,
    /// The manifest's.
    digest: String,
    /// Blobs that were not there.
    sent: usize,
}

/// `basalt push`.
pub(crate) fn push(args: &PushArgs, output: &Output) -> Result<u8> {
    let store = store()?;
    let image = store.get(&args.image)?;
    let destination = match &args.destination {
        Some(destination) => location(destination)?,
        None => own_place(&image, &args.image)?,
    };
    let options = options(&args.registry, &destination)?;
    let steps = Steps::new(output, "sent", !args.quiet);
    let pushed = until_signal(|cancel| {
        let (options, tell) = (with(options, cancel), |step| steps.show(step));
        Ok(registry::push(&store, &image.digest, &destination, &options, &tell)?)
    })?;
    drop(steps);
    let result = Pushed {
        destination: destination.to_string(),
        digest: pushed.digest,
        sent: pushed.sent,
    };
    output.result(&result, || {
        if args.quiet {
            format!("{}\n", result.digest)
        } else {
            format!("{}  {}\n", result.destination, result.digest)
        }
    })?;
    Ok(0)
}

/// Where an image's own name says that it belongs.
fn own_place(image: &Image, reference: &str) -> Result<Location> {
    let given: Option<image::Reference> = reference.parse().ok();
    let is_meant = |name: &&String| {
        let name: Option<image::Reference> = name.parse().ok();
        match (&given, name) {
            (Some(given), Some(name)) => name == *given || name.is_short(given),
            _ => false,
        }
    };
    let meant: Option<Location> = image.names.iter().find(is_meant).and_then(|name| name.parse().ok());
    meant.filter(is_elsewhere).with_context(|| {
        format!(
            "{} names no registry: write `basalt push {reference} HOST/NAME`",
            short_name(reference)
        )
    })
}

/// An image in a registry, also as podman and skopeo write it.
fn location(text: &str) -> Result<Location> {
    Ok(text.strip_prefix("docker://").unwrap_or(text).parse()?)
}

fn options(args: &RegistryArgs, location: &Location) -> Result<Options> {
    let found = match &args.creds {
        Some(given) => Some(given.clone()),
        None => credentials::find(location.host(), location.repository(), &files(args)?)?,
    };
    let mut options = Options {
        registry: a_peer(args, "", found),
        ..Options::default()
    };
    if let Some(directory) = &args.cert_dir {
        if !directory.is_dir() {
            bail!(
                "--cert-dir: {} is no directory: give one with *.crt in it",
                directory.display()
            );
        }
        options.authorities.push(directory.clone());
    }
    Ok(options)
}

/// A mirror. What was given by hand is for the registry.
fn peer(args: &RegistryArgs, mirror: &str, location: &Location) -> Result<Peer> {
    let (host, prefix) = mirror.split_once('/').unwrap_or((mirror, ""));
    let repository = format!("{}/{}", prefix.trim_matches('/'), location.repository());
    // The same grammar as a location's.
    let whole = format!("{mirror}/{}", location.repository());
    whole.parse::<Location>().with_context(|| {
        format!("--mirror {mirror:?} is no registry: write HOST.DOMAIN, HOST:PORT or HOST:PORT/PREFIX")
    })?;
    let found = credentials::find(host, repository.trim_start_matches('/'), &files(args)?)?;
    Ok(a_peer(args, mirror, found))
}

fn a_peer(args: &RegistryArgs, host: &str, credentials: Option<Credentials>) -> Peer {
    Peer {
        host: host.to_owned(),
        credentials,
        insecure: !args.tls_verify,
    }
}

fn files(args: &RegistryArgs) -> Result<Vec<PathBuf>> {
    let Some(file) = &args.authfile else {
        return Ok(credentials::files());
    };
    if !file.exists() {
        bail!(
            "--authfile: {} does not exist: `podman login --authfile` makes one",
            file.display()
        );
    }
    Ok(vec![file.clone()])
}
