//! A verb's arguments for this program in the lab: files and this environment's variables have been read here and are passed otherwise, the image is
//! named by its digest, and a published port has no address, which is this machine's. What was asked for goes along
//! ([`crate::asked`]). Knows no connection.

use anyhow::Result;
use network::PortMapping;

use super::PROGRAM;
use crate::asked;
use crate::cli::{CloneArgs, LogLevel, RunArgs};

/// This program there, with what all verbs have.
fn program(log_level: LogLevel, json: bool) -> Vec<String> {
    let level = log::LevelFilter::from(log_level).as_str().to_ascii_lowercase();
    let mut argv = vec![PROGRAM.to_owned(), format!("--log-level={level}")];
    argv.extend(json.then(|| "--json".to_owned()));
    argv
}

/// Published ports, as the lab publishes them: the addresses are this machine's, and are used here.
fn published(ports: &[String]) -> Result<Vec<String>> {
    let there = |port: &String| -> Result<String> {
        let mapping: PortMapping = port.parse()?;
        let there = PortMapping {
            host_ip: None,
            ..mapping
        };
        Ok(format!("--publish={there}"))
    };
    ports.iter().map(there).collect()
}

/// `basalt run`. `image` is the name that was given, and the digest that it has; none where there is a template.
pub(super) fn run(args: &RunArgs, image: Option<(&str, &str)>, log_level: LogLevel, json: bool) -> Result<Vec<String>> {
    let mut argv = program(log_level, json);
    argv.push("run".into());
    argv.extend(args.tty.then(|| "--tty".to_owned()));
    argv.push(format!("--interactive={}", args.interactive));
    argv.extend(args.size.words());
    argv.extend(args.hotplug.words());
    argv.push(format!("--network={}", args.network.word()));
    argv.extend(args.limits.words());
    argv.extend(args.tmpfs.iter().map(|tmpfs| format!("--tmpfs={tmpfs}")));
    argv.extend(args.device.iter().map(|device| format!("--device={device}")));
    argv.extend(args.accel.map(|accelerator| format!("--accel={accelerator}")));
    argv.extend(published(&args.publish)?);
    argv.extend((!args.publish.is_empty()).then(|| asked::ports_label(&args.publish)));
    argv.extend(image.map(|(name, _)| asked::image_label(name)));
    for volume in args.volume.iter().chain(&args.volume_json) {
        argv.push(format!("--volume-json={}", serde_json::to_string(volume)?));
    }
    argv.push(format!("--paging={}", args.paging));
    argv.extend([format!("--class={}", args.class), format!("--idle={}", args.idle)]);
    argv.push(format!("--memory-mode={}", args.memory_mode));
    argv.extend(args.boot.then(|| "--boot".to_owned()));
    argv.extend(args.rm.then(|| "--rm".to_owned()));
    argv.extend(args.trace.then(|| "--trace".to_owned()));
    argv.extend(args.detach.then(|| "--detach".to_owned()));
    argv.extend(args.no_command.then(|| "--no-command".to_owned()));
    argv.extend(args.label.iter().map(|(key, value)| format!("--label={key}={value}")));
    argv.extend(args.process.words());
    let mut option = |name: &str, value: Option<&str>| argv.extend(value.map(|value| format!("--{name}={value}")));
    option("template", args.template.as_deref());
    option("hostname", args.hostname.as_deref());
    option("name", args.name.as_deref());
    option("entrypoint", args.entrypoint.as_deref());
    option(
        "timeout",
        args.timeout
            .map(|timeout| format!("{}ms", timeout.as_millis()))
            .as_deref(),
    );
    option("on-timeout", args.on_timeout.map(|then| then.to_string()).as_deref());
    argv.push("--".into());
    argv.extend(image.map(|(_, digest)| digest.to_owned()));
    argv.extend(args.command());
    Ok(argv)
}

/// `basalt clone`.
pub(super) fn clone(args: &CloneArgs, log_level: LogLevel, json: bool) -> Result<Vec<String>> {
    let mut argv = program(log_level, json);
    argv.push("clone".into());
    let mut option = |name: &str, value: Option<&str>| argv.extend(value.map(|value| format!("--{name}={value}")));
    option("name", args.name.as_deref());
    option("hostname", args.hostname.as_deref());
    argv.extend(published(&args.publish)?);
    // Also where there are none: its snapshot's labels are its own, the ports are not.
    argv.push(asked::ports_label(&args.publish));
    argv.extend(args.egress.words());
    argv.extend(args.label.iter().map(|(key, value)| format!("--label={key}={value}")));
    argv.push(format!("--paging={}", args.paging));
    argv.extend(args.rm.then(|| "--rm".to_owned()));
    argv.extend(["--".to_owned(), args.snapshot.clone()]);
    Ok(argv)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Verb};
    use clap::Parser;

    fn parse<S: AsRef<str>>(argv: &[S]) -> (RunArgs, Cli) {
        let cli = Cli::try_parse_from(argv.iter().map(AsRef::as_ref)).unwrap();
        let Verb::Run(args) = &cli.verb else { panic!("{cli:?}") };
        ((**args).clone(), cli)
    }

    #[test]
    fn the_far_side_understands_the_same() {
        let near = [
            "basalt",
            "run",
            "-t",
            "--interactive=false",
            "--cpus",
            "3",
            "-m",
            "100m",
            "-w",
            "/x",
            "-u",
            "1:2",
            "--entrypoint=",
            "--hostname=h",
            "--name",
            "n",
            "--rm",
            "--boot",
            "--paging=eager",
            "--class=bare",
            "--idle=poll",
            "--memory-mode=identity",
            "--disk",
            "1g",
            "--tmpfs",
            "/run:size=1m",
            "--device",
            "0000:01:00.0",
            "--device=vendor.com/net=card0",
            "--device-start=late",
            "--cpu-limit",
            "0.5",
            "-l",
            "k=v",
            "-v",
            "cache:/c:ro",
            "-v",
            "/a:b:/d",
            "-p",
            "127.0.0.1:18080:80",
            "--publish=53:53/udp",
            "--timeout",
            "1500ms",
            "--env",
            "A",
            "--env-file",
            "/f",
            "python",
            "--",
            "sh",
            "--",
            "--cpus",
            "-c",
            "exit 3",
        ];
        let (near, _) = parse(&near);
        let argv = run(&near, Some(("python", "sha256:00")), LogLevel::Info, true).unwrap();
        let (far, cli) = parse(&argv);
        assert!(cli.json && cli.log_level == LogLevel::Info);
        assert!(far.process.env.is_empty() && far.process.env_file.is_empty());
        assert_eq!(far.image(), Some("sha256:00"));
        // What was asked for is told, and shown in place of what the lab needs.
        assert_eq!(far.publish, ["18080:80/tcp", "53:53/udp"]);
        let mut config = shown(&far);
        asked::as_asked(&mut config);
        assert_eq!((config.image.as_str(), &config.ports), ("python", &near.publish));
        let labels = config.labels.into_iter().collect::<Vec<_>>();
        assert_eq!(labels, near.label);
        let same = |a: &RunArgs| {
            (
                (a.tty, a.interactive, a.rm, a.detach, a.boot),
                (a.paging, a.class, a.idle, a.memory_mode),
                (
                    a.size.resources(),
                    a.hotplug.words(),
                    a.limits.limits(),
                    a.tmpfs.clone(),
                ),
                (a.process.workdir.clone(), a.process.user.clone(), a.entrypoint.clone()),
                (
                    a.name.clone(),
                    [a.volume.clone(), a.volume_json.clone()].concat(),
                    a.device.clone(),
                ),
            )
        };
        assert_eq!(same(&near), same(&far));
        assert_eq!(
            (&near.hostname, near.timeout, near.on_timeout, near.command()),
            (&far.hostname, far.timeout, far.on_timeout, far.command())
        );
        assert_eq!(far.command(), ["sh", "--", "--cpus", "-c", "exit 3"]);
    }

    /// What the daemon there is asked for.
    fn shown(args: &RunArgs) -> node_api::SandboxConfig {
        crate::run::configure(args, &[], args.size.resources()).unwrap()
    }

    #[test]
    fn a_clone_has_its_own_ports_and_its_snapshots_image() {
        let parse = |argv: &[String]| {
            let cli = Cli::try_parse_from(argv).unwrap();
            let Verb::Clone(args) = cli.verb else { panic!() };
            args
        };
        let near = [
            "basalt",
            "clone",
            "--name=c",
            "-p",
            "127.0.0.2:80:8080",
            "-l",
            "a=b",
            "--rm",
            "--paging=eager",
            "s",
        ];
        let near = parse(&near.map(str::to_owned));
        let far = parse(&clone(&near, LogLevel::Warn, true).unwrap());
        assert_eq!(far.publish, ["80:8080/tcp"]);
        assert_eq!(
            (&far.name, &far.hostname, far.rm, far.paging, &far.snapshot),
            (&near.name, &near.hostname, near.rm, near.paging, &near.snapshot)
        );
        // As the daemon lays them over the snapshot's.
        let (near_run, _) = parse_run_of_a_web_server();
        let mut config = shown(&near_run);
        let over = |config: &mut node_api::SandboxConfig, far: &CloneArgs| {
            config.labels.extend(far.label.iter().cloned());
            config.ports.clone_from(&far.publish);
            asked::as_asked(config);
        };
        let mut cloned = config.clone();
        over(&mut cloned, &far);
        assert_eq!((cloned.image.as_str(), &cloned.ports), ("web", &near.publish));
        let without = parse(&["basalt", "clone", "s"].map(str::to_owned));
        over(&mut config, &parse(&clone(&without, LogLevel::Warn, false).unwrap()));
        assert!(config.ports.is_empty(), "{:?}", config.ports);
    }

    /// A sandbox whose labels a clone has.
    fn parse_run_of_a_web_server() -> (RunArgs, Cli) {
        let (near, _) = parse(&["basalt", "run", "-p", "127.0.0.1:80:80", "web"]);
        parse(&run(&near, Some(("web", "sha256:00")), LogLevel::Warn, false).unwrap())
    }

    #[test]
    fn a_port_that_cannot_be_is_named() {
        let (near, _) = parse(&["basalt", "run", "-p", "80", "web"]);
        let error = run(&near, None, LogLevel::Warn, false).unwrap_err().to_string();
        assert!(error.contains("`80`"), "{error}");
    }

    #[test]
    fn no_command_stays_none() {
        let (near, _) = parse(&["basalt", "run", "python"]);
        let (far, _) = parse(&run(&near, Some(("n", "d")), LogLevel::Warn, false).unwrap());
        assert!(far.command().is_empty() && far.entrypoint.is_none() && far.timeout.is_none());
    }

    #[test]
    fn a_template_takes_the_images_place() {
        let (near, _) = parse(&["basalt", "run", "--template", "web", "-m", "1g", "sh", "-c", "x"]);
        let (far, _) = parse(&run(&near, None, LogLevel::Warn, false).unwrap());
        assert_eq!((far.template.as_deref(), far.image()), (Some("web"), None));
        assert_eq!(far.command(), ["sh", "-c", "x"]);
        // What was not given is the template's.
        assert!(far.size.cpus.is_none() && far.size.disk.is_none() && far.size.memory.is_some());
    }
}
