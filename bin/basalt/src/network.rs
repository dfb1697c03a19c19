//! `basalt network`: what a sandbox may reach. The daemon sees to it.

use anyhow::Result;
use node_api::{Reply, Request, Secrets as _};

use crate::cli::{NetworkVerb, UpdateNetworkArgs};
use crate::daemon;
use crate::output::Output;
use crate::sandboxes::{as_asked, unexpected};

/// `basalt network ...`.
pub(crate) fn network(verb: &NetworkVerb, output: &Output) -> Result<u8> {
    match verb {
        NetworkVerb::Update(args) => update(args, output),
    }
}

fn update(args: &UpdateNetworkArgs, output: &Output) -> Result<u8> {
    let request = Request::UpdateNetwork {
        sandbox: args.sandbox.clone(),
        egress: args.egress.egress()?,
    };
    match daemon::connect()?.ask(request)? {
        (Reply::Sandbox(sandbox), _) => {
            let sandbox = as_asked(*sandbox).redacted();
            output.result(&sandbox, || told(&sandbox.name, &sandbox.config.egress))?;
            Ok(0)
        }
        (other, _) => Err(unexpected(&other)),
    }
}

/// What a sandbox may reach from now on.
pub(crate) fn told(name: &str, egress: &base::Egress) -> String {
    if !egress.restricts() {
        return format!("{name} reaches what sandboxes can\n");
    }
    let list = |ranges: &[base::Cidr]| ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match egress.allow() {
        [] => format!("{name} does not reach {}\n", list(egress.deny())),
        allowed => format!("{name} does not reach {}, but {}\n", list(egress.deny()), list(allowed)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_reaches_is_told() {
        let mut egress: base::Egress = serde_json::from_str(r#"{"deny":["0.0.0.0/0"]}"#).unwrap();
        assert_eq!(told("web", &egress), "web does not reach 0.0.0.0/0\n");
        let both = r#"{"allow":["1.1.1.1","10.0.0.0/8"],"deny":["0.0.0.0/0","::/0"]}"#;
        egress = serde_json::from_str(both).unwrap();
        let says = "web does not reach 0.0.0.0/0, ::/0, but 1.1.1.1, 10.0.0.0/8\n";
        assert_eq!(told("web", &egress), says);
        let nothing = base::Egress::default();
        assert_eq!(told("web", &nothing), "web reaches what sandboxes can\n");
    }
}
