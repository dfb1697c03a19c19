//! The arguments of `basalt network`, and the flags that say where a sandbox may send.

use base::{Cidr, Egress, EgressError};
use clap::{Args, Subcommand};

/// `basalt network ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum NetworkVerb {
    /// Change what a sandbox may reach, also while it runs: open connections to what it may not reach any more end.
    Update(UpdateNetworkArgs),
}

const UPDATE_HELP: &str = "\
Examples:
  basalt network update web --egress-deny 0.0.0.0/0                          it reaches nothing
  basalt network update web --egress-deny 0.0.0.0/0 --egress-allow 192.0.2.7,10.1.0.0/16
  basalt network update web --clear                                          it reaches what sandboxes can

What is given takes the place of all that was. It is kept: by the sandbox's next machines, too, and by clones of snapshots that are taken from then on.";

/// `basalt network update`.
#[derive(Args, Clone, Debug)]
#[command(after_help = UPDATE_HELP)]
pub(crate) struct UpdateNetworkArgs {
    /// The sandbox: a name, or an id or its beginning.
    pub(crate) sandbox: String,

    #[command(flatten)]
    pub(crate) egress: EgressArgs,

    /// Deny nothing any more.
    #[arg(long, required_unless_present = "egress_deny", conflicts_with_all = ["egress_deny", "egress_allow"])]
    pub(crate) clear: bool,
}

/// Where a sandbox may send.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EgressArgs {
    /// Do not let it reach these addresses, such as 10.0.0.0/8: names are not known here. 0.0.0.0/0 is everything, by IPv6 too, and names of
    /// hosts cannot be looked up then.
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    egress_deny: Vec<Cidr>,

    /// Let it reach these although they are denied. 100.127.255.253 is where it looks names up.
    #[arg(long, value_name = "CIDR", value_delimiter = ',', requires = "egress_deny")]
    egress_allow: Vec<Cidr>,
}

impl EgressArgs {
    /// What they say.
    ///
    /// # Errors
    /// There are too many.
    pub(crate) fn egress(&self) -> Result<Egress, EgressError> {
        Egress::new(self.egress_allow.clone(), self.egress_deny.clone())
    }

    /// The same, if they say anything.
    ///
    /// # Errors
    /// There are too many.
    pub(crate) fn given(&self) -> Result<Option<Egress>, EgressError> {
        Ok(Some(self.egress()?).filter(|egress| !egress.is_empty()))
    }

    /// The same flags again, for a program elsewhere.
    pub(crate) fn words(&self) -> Vec<String> {
        let word = |name: &str, ranges: &[Cidr]| {
            let ranges: Vec<String> = ranges.iter().map(Cidr::to_string).collect();
            (!ranges.is_empty()).then(|| format!("--{name}={}", ranges.join(",")))
        };
        let deny = word("egress-deny", &self.egress_deny);
        deny.into_iter()
            .chain(word("egress-allow", &self.egress_allow))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: UpdateNetworkArgs,
    }

    fn parse(words: &[&str]) -> Result<UpdateNetworkArgs, String> {
        let parsed = Program::try_parse_from(["x", "web"].iter().chain(words));
        parsed.map(|program| program.args).map_err(|error| error.to_string())
    }

    #[test]
    fn lists_are_of_several_flags_or_one() {
        let args = parse(&[
            "--egress-deny",
            "0.0.0.0/0",
            "--egress-allow=1.1.1.1,10.0.0.0/8",
            "--egress-allow",
            "2001:db8::/32",
        ])
        .unwrap();
        let egress = args.egress.egress().unwrap();
        assert_eq!((egress.allow().len(), egress.deny().len()), (3, 1));
        let words = args.egress.words();
        assert_eq!(
            words,
            [
                "--egress-deny=0.0.0.0/0",
                "--egress-allow=1.1.1.1,10.0.0.0/8,2001:db8::/32"
            ]
        );
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        assert_eq!(parse(&words).unwrap().egress, args.egress);
        assert_eq!(args.egress.given(), Ok(Some(egress)));
        let cleared = parse(&["--clear"]).unwrap().egress;
        assert!(cleared.words().is_empty() && cleared.given() == Ok(None));
    }

    #[test]
    fn what_would_do_nothing_is_refused() {
        // An allow list alone restricts nothing.
        assert!(
            parse(&["--egress-allow", "1.1.1.1"])
                .unwrap_err()
                .contains("--egress-deny")
        );
        assert!(parse(&[]).unwrap_err().contains("--clear"));
        assert!(
            parse(&["--clear", "--egress-deny", "::/0"])
                .unwrap_err()
                .contains("--clear")
        );
        assert!(
            parse(&["--egress-deny", "example.com"])
                .unwrap_err()
                .contains("10.0.0.0/8")
        );
        assert!(
            parse(&["--egress-deny", "10.0.0.1/8"])
                .unwrap_err()
                .contains("write 10.0.0.0/8")
        );
        let many = vec!["1.1.1.1"; 513].join(",");
        let refused = parse(&["--egress-deny", &many]).unwrap().egress.egress();
        assert!(refused.unwrap_err().to_string().contains("513"));
    }
}
