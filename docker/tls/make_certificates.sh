#!/usr/bin/env bash
# Creates a certificate authority and certificates that it signs, for tests or for the connections between balancer and
# replicas.
#
#   make_certificates.sh FOLDER NAME...
#
# FOLDER/ca.crt, ca.key     the authority; its key can sign any identity, so remove the key from the servers
# FOLDER/NAME.crt, .key     for every NAME (DNS name or address), valid for a server and a client
# FOLDER/NAME.pem           both in one file, for HAProxy
# FOLDER/client.*           the same for a client
#
# An existing authority is reused. Certificates are valid for 90 days.
set -euo pipefail
umask 077

folder=${1:?pass a folder, then the names of the servers}
shift
mkdir -p "$folder"
cd "$folder"

key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
if [[ ! -e ca.key ]]; then
    openssl req -x509 "${key[@]}" -keyout ca.key -out ca.crt -days 825 -subj "/CN=token2wav authority" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi

sign() {
    local name=$1 usage=$2 kind=DNS
    if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then
        kind=IP
    fi
    openssl req -new "${key[@]}" -keyout "$name.key" -out "$name.csr" -subj "/CN=$name"
    openssl x509 -req -in "$name.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 90 -out "$name.crt" -extfile <(
        echo "basicConstraints=critical,CA:FALSE"
        echo "keyUsage=critical,digitalSignature"
        echo "extendedKeyUsage=$usage"
        echo "subjectAltName=$kind:$name"
    )
    cat "$name.crt" "$name.key" > "$name.pem"
    rm "$name.csr"
}

for name in "$@"; do
    sign "$name" serverAuth,clientAuth
done
sign client clientAuth
