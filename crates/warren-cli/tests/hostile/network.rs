//! 4.6: the network, as far as it can be asked of one sandbox.

use std::net::UdpSocket;
use std::os::unix::net::UnixListener;

use crate::host::Host;

hostile! {
    loopback_of_the_host_is_not_reached,
    sockets_of_the_host_are_not_reached,
    service_sockets_are_absent,
    no_route_leads_out,
    the_host_is_not_reached_by_a_gateway,
    no_other_protocol_leads_out,
    there_is_no_link_to_a_neighbour,
}

hostile_by_gvisor! {
    loopback_of_the_host_is_not_reached,
    sockets_of_the_host_are_not_reached,
    service_sockets_are_absent,
    no_route_leads_out,
    the_host_is_not_reached_by_a_gateway,
    no_other_protocol_leads_out,
    there_is_no_link_to_a_neighbour,
}

hostile_as_root_inside! {
    loopback_of_the_host_is_not_reached,
    sockets_of_the_host_are_not_reached,
    service_sockets_are_absent,
    no_route_leads_out,
}

const REFUSED: &[&str] = &[
    "ECONNREFUSED",
    "ENETUNREACH",
    "EHOSTUNREACH",
    "EPERM",
    "EACCES",
    "EADDRNOTAVAIL",
    "EAFNOSUPPORT",
    "ENOENT",
];

/// The address from which the host would speak to the world, if it has one.
fn own_address(towards: &str, from: &str) -> Option<String> {
    let socket = UdpSocket::bind(from).ok()?;
    socket.connect(towards).ok()?;
    Some(socket.local_addr().ok()?.ip().to_string())
}

// N1: network namespace
fn loopback_of_the_host_is_not_reached(host: &Host) {
    let victim = host.bare().start(&["victim n1 0"]);
    let port = victim.said("port");
    let mut addresses: Vec<String> =
        ["127.0.0.1", "0.0.0.0", "127.1.2.3", "::1", "::", "::ffff:127.0.0.1"]
            .map(String::from)
            .to_vec();
    addresses.extend(own_address("203.0.113.1:9", "0.0.0.0:0"));
    addresses.extend(own_address("[2001:db8::1]:9", "[::]:0"));
    let dials: Vec<_> = addresses.iter().map(|a| format!("tcp {a} {port}")).collect();
    host.bare().allows(&dials);
    for profile in host.profiles() {
        host.sandbox().with(&format!("--profile {profile}")).refuses(&dials, REFUSED);
    }
}

// N2: network namespace, Landlock; a root of its own
fn sockets_of_the_host_are_not_reached(host: &Host) {
    let _victim = host.bare().start(&["victim n2 0"]);
    let path = host.path("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let dials = ["abstract n2".to_owned(), format!("unix {}", path.display())];
    host.bare().allows(&dials);
    for profile in host.profiles() {
        host.sandbox().with(&format!("--profile {profile}")).refuses(&dials, REFUSED);
    }
}

// N3: a root of its own
fn service_sockets_are_absent(host: &Host) {
    let tag = host.path("").file_name().unwrap().to_str().unwrap().to_owned();
    let ours = format!("/run/{tag}.sock");
    let listener = UnixListener::bind(&ours).unwrap();
    let sockets = "/run/docker.sock /var/run/docker.sock /run/containerd/containerd.sock /run/podman/podman.sock \
        /run/crio/crio.sock /run/dbus/system_bus_socket /run/systemd/private /run/systemd/notify \
        /run/systemd/journal/socket /run/systemd/journal/dev-log /run/udev/control /run/user/0/bus /dev/log \
        /run/user/65534/bus /run/warren /run/warren.sock /tmp/.X11-unix /run/postgresql /run/snapd.socket";
    let stats: Vec<_> =
        sockets.split_whitespace().chain([&*ours]).map(|s| format!("stat {s}")).collect();
    let control = host.bare_root().ask(&format!("stat {ours}"));
    std::fs::remove_file(&ours).map(|()| drop(listener)).unwrap();
    assert_eq!(control.result, "OK", "control: a socket in /run is there on the host");
    let listener = UnixListener::bind(&ours).unwrap();
    let answers = host.sandbox().ask_all(&stats);
    let dials: Vec<_> = stats.iter().map(|stat| stat.replace("stat ", "unix ")).collect();
    let connected = host.sandbox().ask_all(&dials);
    std::fs::remove_file(&ours).map(|()| drop(listener)).unwrap();
    for (dial, answer) in dials.iter().zip(connected) {
        assert!(REFUSED.contains(&answer.result.as_str()), "{dial}: {answer:?}");
    }
    if !host.has_namespaces() {
        assert!(answers.iter().any(|answer| answer.result == "OK"), "{answers:?}");
        return host.not_promised("hidden metadata");
    }
    for (stat, answer) in stats.iter().zip(answers) {
        assert!(
            ["ENOENT", "ENOTDIR", "EACCES"].contains(&answer.result.as_str()),
            "{stat}: {answer:?}"
        );
    }
}

// N5: network namespace without a route
fn no_route_leads_out(host: &Host) {
    let outside = host.bare().ask("read /proc/self/net/dev").detail;
    assert!(
        outside.matches(':').count() > 1,
        "control: the host has more than a loopback: {outside}"
    );
    let inside = host.sandbox().ask("read /proc/self/net/dev").detail;
    let interfaces: Vec<_> =
        inside.split_whitespace().filter_map(|w| w.strip_suffix(':')).collect();
    if host.has_namespaces() {
        assert!(interfaces == ["lo"] || interfaces.is_empty(), "{interfaces:?}");
    } else {
        assert!(interfaces.len() > 1, "{interfaces:?}");
        host.not_promised("a /proc of its own");
    }
    let mut dials = vec![];
    for address in
        ["1.1.1.1", "169.254.169.254", "10.0.0.1", "192.168.0.1", "172.17.0.1", "100.100.100.200"]
    {
        dials.extend([format!("tcp {address} 80"), format!("udp {address} 53")]);
    }
    for address in
        ["2606:4700:4700::1111", "fd00:ec2::254", "fe80::1", "64:ff9b::a9fe:a9fe", "::ffff:1.1.1.1"]
    {
        dials.extend([format!("tcp {address} 80"), format!("udp {address} 53")]);
    }
    // Control: a datagram socket is connected by a route alone, and loopback has one in both places.
    host.bare().allows(&["udp 127.0.0.1 53"]);
    let loopback = ["udp 127.0.0.1 53"];
    match host.has_namespaces() {
        true => host.sandbox().allows(&loopback),
        false => host.sandbox().refuses(&loopback, &["EPERM"]),
    }
    for profile in host.profiles() {
        let refused = [
            "ENETUNREACH",
            "EHOSTUNREACH",
            "EPERM",
            "EACCES",
            "EINVAL",
            "EADDRNOTAVAIL",
            "EAFNOSUPPORT",
        ];
        host.sandbox().with(&format!("--profile {profile}")).refuses(&dials, &refused);
    }
}

/// The gateways of the host, by its table of routes.
fn gateways() -> Vec<String> {
    let table = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
    let gateways = table.lines().skip(1).filter_map(|line| line.split_whitespace().nth(2));
    let numbers = gateways.filter_map(|hex| u32::from_str_radix(hex, 16).ok()).filter(|n| *n != 0);
    numbers.map(|n| std::net::Ipv4Addr::from(n.swap_bytes()).to_string()).collect()
}

// N4: network namespace without a route
fn the_host_is_not_reached_by_a_gateway(host: &Host) {
    let victim = host.bare().start(&["victim n4 0"]);
    let port = victim.said("port");
    let own = own_address("203.0.113.1:9", "0.0.0.0:0");
    let reached: Vec<_> = own.iter().map(|own| format!("tcp {own} {port}")).collect();
    host.bare().allows(&reached);
    let usual = ["10.0.2.2", "10.0.0.1", "172.17.0.1", "192.168.0.1", "192.168.122.1"];
    let gateways = gateways().into_iter().chain(usual.map(str::to_owned));
    let mut dials: Vec<_> = gateways.map(|address| format!("tcp {address} {port}")).collect();
    dials.extend(reached);
    host.sandbox().refuses(&dials, REFUSED);
    let routes = host.sandbox().ask("read /proc/self/net/route");
    if host.has_namespaces() {
        assert!(!routes.detail.contains("0000"), "there is no route: {routes:?}");
    }
}

// N10: network namespace without a route; seccomp
fn no_other_protocol_leads_out(host: &Host) {
    // Control: a route is all that a datagram needs; loopback has one on the host.
    host.bare().allows(&["udp 127.0.0.1 53", "udp 127.0.0.1 443"]);
    host.bare_root().allows(&["socket 2 3 1", "socket 10 3 58"]);
    let dials = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"]
        .iter()
        .flat_map(|address| [53, 443, 853, 1080, 123].map(|port| format!("udp {address} {port}")));
    let refused = [REFUSED, &["EINVAL"]].concat();
    host.sandbox().refuses(&dials.collect::<Vec<_>>(), &refused);
    // ICMP, raw and by a datagram socket, and SCTP.
    let sockets =
        ["socket 2 3 1", "socket 10 3 58", "socket 2 2 1", "socket 10 2 58", "socket 2 1 132"];
    let refused = ["EPERM", "EACCES", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EAFNOSUPPORT"];
    host.sandbox().refuses(&sockets, &refused);
}

// N13: network namespace with a loopback and no link; seccomp
fn there_is_no_link_to_a_neighbour(host: &Host) {
    let packet = ["socket 17 3 0", "socket 17 2 0"];
    host.bare_root().allows(&packet);
    host.sandbox().refuses(&packet, &["EPERM", "EACCES", "EAFNOSUPPORT"]);
    // Without a network of its own there is no socket to use the host's with.
    if host.has_namespaces() {
        let running = host.sandbox().start(&["wait-eof"]);
        let pid = *crate::processes::inside(host, running.pid()).last().unwrap();
        let links = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap();
        let names: Vec<_> = links
            .lines()
            .skip(2)
            .filter_map(|line| line.split(':').next())
            .map(str::trim)
            .collect();
        assert_eq!(names, ["lo"], "as seen from the host");
    }
}
